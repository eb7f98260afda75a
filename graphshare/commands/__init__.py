"""What the command line does; each module is a command, imported when it is called for."""
