"""On a coordinator's PYTHONPATH: it is ended by SIGKILL while it aggregates, its objects made and nothing committed.

EDGEFL_TEST_KILLED: which round inside a period it is, counted from 1 over the process' life.
"""

import os
import signal

if number := int(os.environ.get("EDGEFL_TEST_KILLED", "0")):
    from edgefl.aggregation import layer_round

    exchange_layers, rounds = layer_round.exchange_layers, []

    def exchange_and_die(*given):
        rounds.append(exchange_layers(*given))
        if len(rounds) == number:
            os.kill(os.getpid(), signal.SIGKILL)
        return rounds[-1]

    layer_round.exchange_layers = exchange_and_die
