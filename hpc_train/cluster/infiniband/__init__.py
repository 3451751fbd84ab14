"""An InfiniBand subnet as ibnetdiscover dumps it: text -> devices and cables -> names -> levels -> Cluster."""
