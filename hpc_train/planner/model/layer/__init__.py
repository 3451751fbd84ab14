"""One layer: the time of its computation and communication, and the memory of its activations.

layer_work.py has the computation, from products.py (matrix products), experts.py and adapters.py. layer_time.py adds
the communication inside of a layer. activations.py has what is stored for backward.
"""
