"""Readers of files of records: one file a format, each recognised by content. See formats.list_formats."""
