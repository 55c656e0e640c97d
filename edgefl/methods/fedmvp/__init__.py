"""FedMVP (arXiv 2406.11048): completed modalities, a joint representation, and weights by agreement.

missing: ``completion`` makes an absent half once, before training (section 3.2).
fusion: ``joint`` (equations 2-3).  objective: ``mcm`` (4-5) and ``ram`` (6-7).
weight: ``cka``, by the models' outputs on the same probe samples.
"""
