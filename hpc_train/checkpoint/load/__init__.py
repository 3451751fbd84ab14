"""Read a checkpoint into any layout: plan which bytes a rank needs, read and verify them, pass on what several need."""
