"""What can be seen before anything is played: the folder, the models, the image."""
