"""From a started process to a World: who am I, where do we meet, the process group and the mesh, signals."""
