"""Environment servers: started and kept alive by the controller, used by workers through leased sessions."""
