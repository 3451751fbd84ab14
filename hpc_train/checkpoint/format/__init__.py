"""The bytes of a checkpoint, as docs/checkpoint_format.md specifies them: a change here changes what others read."""
