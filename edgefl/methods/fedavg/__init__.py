"""FedAvg (McMahan et al., AISTATS 2017, arXiv 1602.05629):  theta = sum_k (n_k / n) theta_k, part by part.

weight: ``samples`` gives n_k / n over the devices that trained a part; ``own``: each device trains alone.
combine: ``weighted_mean`` is the sum.
"""
