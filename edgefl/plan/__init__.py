"""From a run file, its recipe and the data's shapes to a run's plan: model, stages, hyper-parameters and slots."""
