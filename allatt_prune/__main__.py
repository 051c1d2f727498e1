"`python -m allatt_prune` is the command `allatt-prune`."
from allatt_prune.engine.cli import main

if __name__ == "__main__": main()
