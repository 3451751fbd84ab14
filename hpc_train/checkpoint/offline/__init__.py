"""Steps that one process writes without holding them: from another step, or from another library's files.

source      tensors by name and rectangle, wherever they are
cutting     which file gets which rectangle
blocks      a shard file that is written in any order
rewriting   all of it, committed as a save is
"""
