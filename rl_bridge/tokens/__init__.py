"""From messages to token ids and back, and from turns to training rows."""
