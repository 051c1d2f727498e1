"The command in a process of its own, without the seconds that loading PyTorch takes: one that has loaded it is forked."
import atexit, functools, json, os, subprocess, sys, tempfile
from pathlib import Path

SERVER = '''
import json, os, runpy, signal, sys, traceback
import matplotlib.pyplot, torch._dynamo, allatt_prune.repair, allatt_prune.targets, allatt_prune.engine.run

def run(args, cwd, env, files):
    signal.alarm(300)
    os.environ.clear(), os.environ.update(env), os.chdir(cwd)
    for fd, name in enumerate(files): os.dup2(os.open(name, os.O_RDWR), fd)
    sys.stdin, sys.argv = os.fdopen(0), ['allatt-prune', *args]
    try: runpy.run_module('allatt_prune', run_name='__main__', alter_sys=True)
    except SystemExit as end: return end.code or 0
    except BaseException: traceback.print_exc(); return 1
    return 0

asked, answers = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), 'w')
while line := asked.readline():
    if not (pid := os.fork()):
        status = run(*json.loads(line))
        sys.stdout.flush(), sys.stderr.flush(), os._exit(status)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), file=answers, flush=True)
'''

@functools.cache
def server():
    p = subprocess.Popen([sys.executable, '-c', SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    atexit.register(lambda: (p.stdin.close(), p.wait()))
    return p

def command(*args, cwd, env=None, input=''):
    "As subprocess.run([sys.executable, '-m', 'allatt_prune', *args], cwd=..., env=..., input=..., capture_output=True, text=True)."
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder)/name for name in ('in', 'out', 'err')]
        for file, text in zip(files, (input, '', '')): file.write_text(text)
        print(json.dumps([args, str(cwd), dict(env or os.environ), list(map(str, files))]), file=server().stdin, flush=True)
        status = int(server().stdout.readline())
        return subprocess.CompletedProcess(args, status, *(f.read_text() for f in files[1:]))
