"""The commands: each file parses the options of one, calls a room, and prints. No room imports this one."""
