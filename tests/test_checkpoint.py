"What a folder of checkpoints must survive: strangers' files in it, links, damage, other permissions, forged settings."
import errno, fcntl, os, shutil, signal, subprocess, sys, threading, time
from pathlib import Path
import pytest, torch
from allatt_prune.engine.checkpoint import copy, load, lock, new_folder, newest, read, save, save_step, seal, sweep, verify, write_file
from allatt_prune.model import LM, LMConfig

def state(folder):
    def content(p): return os.readlink(p) if p.is_symlink() else p.read_bytes() if p.is_file() else None
    return {str(p.relative_to(folder)): content(p) for p in sorted(folder.rglob('*'))}

def steps(folder, *numbers, phase='gated'):
    for n in numbers: save_step(folder, phase, n, dict(step=n), model=dict(x=torch.full((9,), float(n))))

def names(folder): return sorted(p.name for p in folder.iterdir())

# ---- what is deleted, and what is not

def test_only_what_we_wrote_is_deleted(tmp_path):
    here, outside = tmp_path/'checkpoints', tmp_path/'outside'
    steps(here, 10), steps(outside, 7)
    (outside/'letter').write_text('precious')
    ours = {k for k in state(here)}
    (here/'photos-2024').mkdir()
    (here/'photos-2024'/'me.jpg').write_bytes(b'precious')
    (here/'letters-1999').symlink_to(outside)                              # a name like ours, and a link
    (here/'gated-00000007').symlink_to(outside/'gated-00000007')           # even a checkpoint of ours, but a link
    for name in ('backup-00000010', 'gated-00000005'): shutil.copytree(here/'gated-00000010', here/name) # copies
    (here/'.notes.tmp-0a1b2c3d').mkdir()
    (here/'.notes.tmp-0a1b2c3d'/'mine').write_text('precious')             # a name like that of what a killed writer leaves
    (here/'.link.tmp-allatt_prune-0a1b2c3d').symlink_to(outside)
    (here/'gated-00000002').write_text('a file')
    os.mkdir(here/'gated-00000003')
    os.mkfifo(here/'gated-00000003'/'config.json')                         # whoever reads it waits for ever
    shutil.copy(here/'gated-00000010'/'manifest.json', here/'gated-00000003')
    before, theirs = state(outside), {k: v for k, v in state(here).items() if k not in ours}
    steps(here, 200, 300, 400)
    steps(here, 0, 100, 200, phase='later')
    after = state(here)
    assert state(outside) == before and theirs.items() <= after.items()
    assert {k.split('/')[0] for k in after.keys() - theirs.keys()} == {'gated-00000400', 'later-00000100', 'later-00000200'}
    assert newest(here, 'gated')[0]['step'] == 400                         # the newest of every phase stays

def added(folder): (folder/'notes.txt').write_text('precious')
def removed(folder): (folder/'model.safetensors').unlink()
def linked(folder):                                                        # somebody made room, and left a link
    shutil.move(folder/'model.safetensors', folder.parent/'model.safetensors')
    (folder/'model.safetensors').symlink_to(folder.parent/'model.safetensors')

@pytest.mark.parametrize('change', (added, removed, linked))
def test_a_checkpoint_that_somebody_changed_is_kept(tmp_path, change):
    steps(tmp_path, 100)
    change(tmp_path/'gated-00000100')
    before = state(tmp_path)
    steps(tmp_path, 200, 300, 400)
    assert before.items() <= state(tmp_path).items() and 'gated-00000200' not in names(tmp_path)

def test_what_is_damaged_is_set_aside_and_not_deleted(tmp_path):
    steps(tmp_path, 100, 200)
    (tmp_path/'gated-00000200'/'manifest.json').write_bytes(b'rubbish')    # is it ours? nobody can tell
    with pytest.warns(UserWarning, match='going back'): assert newest(tmp_path, 'gated')[0]['step'] == 100
    steps(tmp_path, 200)
    verify(tmp_path/'gated-00000200')
    aside, = tmp_path.glob('gated-00000200.damaged-*')
    steps(tmp_path, 300, 400)
    assert (aside/'manifest.json').read_bytes() == b'rubbish'

def test_a_link_to_a_checkpoint_of_that_name(tmp_path):
    here, outside = tmp_path/'here', tmp_path/'outside'
    steps(outside, 100)
    before = state(outside)
    here.mkdir()
    (here/'gated-00000100').symlink_to(outside/'gated-00000100')
    steps(here, 100)
    assert state(outside) == before and not (here/'gated-00000100').is_symlink()
    verify(here/'gated-00000100')

def test_linked_checkpoints_are_refused(tmp_path):
    steps(tmp_path/'elsewhere', 1)                                         # those of another run
    (tmp_path/'checkpoints').symlink_to(tmp_path/'elsewhere')
    before = state(tmp_path)
    for job in (lambda: steps(tmp_path/'checkpoints', 2, 3, 4), lambda: newest(tmp_path/'checkpoints', 'gated')):
        with pytest.raises(OSError, match='checkpoints: a link; put a folder there'): job()
    assert state(tmp_path) == before

def test_sweeping(tmp_path):
    mine = '.a.tmp-0a1b2c3d', '.a.tmp-allatt_prune-mine', 'a.tmp-allatt_prune-0a1b2c3d', '.a.tmp-allatt_prune-0a1b2c3d.txt'
    for name in mine: (tmp_path/name).write_text('precious')
    (tmp_path/'.gated-00000001.tmp-allatt_prune-0a1b2c3d').mkdir()
    (tmp_path/'.gated-00000001.tmp-allatt_prune-0a1b2c3d'/'config.json').write_text('half')
    (tmp_path/'.report.md.tmp-allatt_prune-0a1b2c3d').write_text('half')
    save(tmp_path/'x', {})                                                 # another writer may be at work
    assert len(names(tmp_path)) == len(mine) + 3
    sweep(tmp_path)
    verify(tmp_path/'x')
    assert names(tmp_path) == sorted((*mine, 'x'))

@pytest.mark.parametrize('half', (False, True))
def test_killed_while_an_old_one_is_deleted(tmp_path, monkeypatch, half):
    class Killed(BaseException): pass
    def killed(path, **_):
        if not path.exists(): return                                       # of a folder that has got its name
        if half: (path/'config.json').unlink()
        raise Killed
    steps(tmp_path, 100, 200)
    with monkeypatch.context() as m:
        m.setattr(shutil, 'rmtree', killed)
        with pytest.raises(Killed): steps(tmp_path, 300)
    assert newest(tmp_path, 'gated')[0]['step'] == 300
    for p in tmp_path.glob('gated-*'): verify(p)                           # none has a name and is not whole
    steps(tmp_path, 400)
    assert names(tmp_path) == ['gated-00000300', 'gated-00000400']

# ---- files

def test_files_of_any_kind_can_be_sealed(tmp_path):
    with new_folder(tmp_path/'corpus', 'cache') as tmp:
        (tmp/'ids.bin').write_bytes(bytes(10**6))
        write_file(tmp/'corpus.json', b'[]')
        seal(tmp, ['ids.bin', 'corpus.json'])
    assert sorted(verify(tmp_path/'corpus')) == ['corpus.json', 'ids.bin']
    (tmp_path/'corpus'/'ids.bin').write_bytes(bytes(10**6 - 1) + b'x')
    with pytest.raises(OSError, match='cache=.*corpus: ids.bin is damaged'): verify(tmp_path/'corpus', 'cache')
    assert read(tmp_path/'corpus', 'corpus.json') == b'[]'                 # which is not

def test_a_pipe_is_no_file(tmp_path):
    save(tmp_path/'model', {}, x=[1])
    os.remove(tmp_path/'model'/'x.json')
    os.mkfifo(tmp_path/'model'/'x.json')                                   # whoever reads it waits for ever
    with pytest.raises(OSError, match='x.json is missing'): load(tmp_path/'model')

def test_no_file_is_written_through_a_link(tmp_path):
    (tmp_path/'precious').write_text('precious')
    for name, target in (('report.md', 'precious'), ('dangling.md', 'nowhere')):
        (tmp_path/name).symlink_to(tmp_path/target)
        write_file(tmp_path/name, b'new')
        assert not (tmp_path/name).is_symlink() and (tmp_path/name).read_bytes() == b'new'
    assert (tmp_path/'precious').read_text() == 'precious' and not (tmp_path/'nowhere').exists()
    (tmp_path/'folder').mkdir()
    with pytest.raises(OSError): write_file(tmp_path/'folder', b'new')
    assert names(tmp_path) == ['dangling.md', 'folder', 'precious', 'report.md'] # and no temporary file is left

@pytest.mark.parametrize('mask', (0o022, 0o077, 0o002))
def test_umask_is_respected(tmp_path, mask):
    old = os.umask(mask)
    try:
        save(tmp_path/'model', dict(a=1), model=dict(x=torch.ones(2)))
        copy(tmp_path/'model', tmp_path/'copy')
        write_file(tmp_path/'file', b'x')
    finally: os.umask(old)
    for p in tmp_path.rglob('*'): assert p.stat().st_mode & 0o777 == (0o777 if p.is_dir() else 0o666) & ~mask, p

def test_a_copy_is_what_the_manifest_names(tmp_path):
    save(tmp_path/'model', dict(a=1), model=dict(x=torch.ones(2)))
    (tmp_path/'model'/'huge').symlink_to('/dev/zero')                      # whoever follows it never ends
    copy(tmp_path/'model', tmp_path/'copy')
    assert names(tmp_path/'copy') == ['config.json', 'manifest.json', 'model.safetensors']
    assert torch.equal(load(tmp_path/'copy')[1]['model']['x'], torch.ones(2))
    (tmp_path/'model'/'model.safetensors').write_bytes(b'rubbish')
    with pytest.raises(OSError, match='checkpoint=.*model: model.safetensors is damaged'): copy(tmp_path/'model', tmp_path/'other')
    assert names(tmp_path) == ['copy', 'model']

def test_all_is_on_the_disk_before_a_folder_gets_its_name(tmp_path, monkeypatch):
    steps(tmp_path, 100, 200)
    done, fsync, rename = [], os.fsync, os.rename
    monkeypatch.setattr(os, 'fsync', lambda fd: (done.append(Path(os.readlink(f'/proc/self/fd/{fd}'))), fsync(fd)))
    monkeypatch.setattr(os, 'rename', lambda a, b: (done.append(('rename', a, Path(b).name)), rename(a, b)))
    steps(tmp_path, 300)
    at = next(i for i, x in enumerate(done) if isinstance(x, tuple))
    _, tmp, name = done[at]
    written = {p.name for p in done[:at] if p.parent == tmp}               # the manifest had a temporary name before
    assert {'config.json', 'model.safetensors'} < written and len(written) == 3 and done[at-1] == tmp
    assert name == 'gated-00000300' and done[at+1] == tmp_path             # and the name was, before an old one went
    assert done[at+2][1].name == 'gated-00000100'

OPENS = """
import re, resource, sys
from pathlib import Path
from allatt_prune.model import LM
size = int(re.search(r'VmSize:\\s+(\\d+) kB', Path('/proc/self/status').read_text())[1]) * 1024
resource.setrlimit(resource.RLIMIT_AS, (size + 2**30,) * 2)                  # a gigabyte more, no further
for folder in sys.argv[1:]:
    try: LM.from_pretrained(folder)
    except OSError as e: print(str(e).splitlines()[0])
"""

def test_a_forged_configuration_takes_no_memory(tmp_path):
    cfg = dict(vocab=27, n_layer=2, d_model=32, n_head=4, n_persistent=8, seg_len=8, mem_len=8)
    weights, changes = LM(LMConfig(**cfg)).state_dict(), (dict(vocab=10**8), dict(n_persistent=10**7), dict(d_ff=10**7), {})
    for i, change in enumerate(changes): save(tmp_path/f'{i}', cfg | change, model=weights)
    done = subprocess.run([sys.executable, '-c', OPENS, *'0123'], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert [line[:12] for line in done.stdout.splitlines()] == [f'checkpoint={i}' for i in range(3)]

# ---- locks

def working(file): # another process that has the lock, until it is killed
    ready, told = os.pipe()
    if pid := os.fork():
        assert os.read(ready, 1) == b'!'
        return pid
    with lock(file, 'run_dir'):
        os.write(told, b'!')
        time.sleep(60)
    os._exit(0)

def killed(pid): os.kill(pid, signal.SIGKILL), os.waitpid(pid, 0)

def test_a_lock_says_who_has_it_and_ends_with_the_process(tmp_path):
    pid = working(tmp_path/'.lock')
    try:
        with pytest.raises(OSError, match=f'^run_dir={tmp_path}: process {pid} of .*, since 20.*, works there; wait for it'):
            with lock(tmp_path/'.lock', 'run_dir'): pass
        threading.Timer(6, killed, [pid]).start()
        since = time.monotonic()
        with pytest.warns(UserWarning, match=f'^cache={tmp_path}: process {pid} of .* works there; waiting for it$'):
            with lock(tmp_path/'.lock', 'cache', wait=True): assert time.monotonic() - since > 5
    except BaseException:
        os.kill(pid, signal.SIGKILL)
        raise
    with lock(tmp_path/'.lock', 'run_dir'): assert (tmp_path/'.lock').read_text().startswith(f'process {os.getpid()} of ')

@pytest.mark.parametrize('code', (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK))
def test_a_file_system_without_locks(tmp_path, monkeypatch, code):
    def flock(*_): raise OSError(code, os.strerror(code))
    monkeypatch.setattr(fcntl, 'flock', flock)
    with pytest.raises(OSError, match='cannot be locked'):
        with lock(tmp_path/'.lock', 'run_dir'): pass

def test_an_error_of_the_work_is_not_one_of_the_lock(tmp_path):
    with pytest.raises(OSError, match='^.Errno 28. full$'):
        with lock(tmp_path/'.lock', 'run_dir'): raise OSError(errno.ENOSPC, 'full')
    with lock(tmp_path/'.lock', 'run_dir'): pass                           # and it was released
