"""From files to a token store: find the files, cut them into parts, tokenize the parts in parallel, join them."""
