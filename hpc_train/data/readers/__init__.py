"""Readers of files of records: one file per format, each recognised by content. See formats.list_formats."""
