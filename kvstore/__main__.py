"""`python -m kvstore --config FILE --name store-0 --node NODE --router tcp://127.0.0.1:20052`"""

from baton import process
from kvstore.service import run

if __name__ == "__main__":
    raise SystemExit(process.main("kvstore", run))
