"`python -m allatt_prune` is the command `allatt-prune`."
from allatt_prune.engine.options import start

if __name__ == "__main__": start()
