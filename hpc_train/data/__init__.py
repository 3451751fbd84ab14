"""Token stores, corpora, the order of samples and the loader. Importing this package imports neither torch nor h5py."""
