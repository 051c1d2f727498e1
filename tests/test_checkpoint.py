"What a folder of checkpoints must survive: strangers' files in it, links, killed writers."
import errno, hashlib, json, os, shutil, signal, stat, subprocess, sys, time
from pathlib import Path
import pytest, torch
from allatt_prune.engine.checkpoint import load, new_folder, newest, read, read_part, save, save_step, saved_steps, seal, sweep, verify, write_file
from allatt_prune import LM, LMConfig

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
    shutil.copytree(here/'gated-00000010', here/'backup-00000010')
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
    assert {k.split('/')[0] for k in after.keys() - theirs.keys()} == {f'{x}00' for x in ('gated-000003', 'gated-000004', 'later-000001', 'later-000002')}
    assert newest(here, 'gated')[0]['step'] == 400

def added(folder): (folder/'notes.txt').write_text('precious')
def removed(folder): (folder/'model.safetensors').unlink()

@pytest.mark.parametrize('change', (added, removed))
def test_a_checkpoint_that_somebody_changed_is_kept(tmp_path, change):
    steps(tmp_path, 100)
    change(tmp_path/'gated-00000100')
    before = state(tmp_path)
    steps(tmp_path, 200, 300, 400)
    assert before.items() <= state(tmp_path).items() and 'gated-00000200' not in names(tmp_path)

def test_a_link_to_a_checkpoint_of_that_name(tmp_path):
    here, outside = tmp_path/'here', tmp_path/'outside'
    steps(outside, 100)
    before = state(outside)
    here.mkdir()
    (here/'gated-00000100').symlink_to(outside/'gated-00000100')
    with pytest.raises(FileExistsError): steps(here, 100)
    assert state(outside) == before and (here/'gated-00000100').is_symlink()

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

@pytest.mark.parametrize('mask', (0o077, 0o002))
def test_umask_is_respected(tmp_path, mask):
    old = os.umask(mask)
    try:
        save(tmp_path/'model', dict(a=1), model=dict(x=torch.ones(2)))
        write_file(tmp_path/'file', b'x')
    finally: os.umask(old)
    for p in tmp_path.rglob('*'): assert p.stat().st_mode & 0o777 == (0o777 if p.is_dir() else 0o666) & ~mask, p

def test_all_is_on_the_disk_before_a_folder_gets_its_name(tmp_path, monkeypatch):
    steps(tmp_path, 100, 200)
    done, fsync, replace, rename = [], os.fsync, os.replace, os.rename
    monkeypatch.setattr(os, 'fsync', lambda fd: (done.append(Path(os.readlink(f'/proc/self/fd/{fd}'))), fsync(fd)))
    for name, f in dict(replace=replace, rename=rename).items():
        monkeypatch.setattr(os, name, lambda a, b, f=f: (f(a, b), done.append((Path(a), Path(b).name))))
    steps(tmp_path, 300)
    at = next(i for i, x in enumerate(done) if isinstance(x, tuple) and x[1] == 'gated-00000300')
    tmp, _ = done[at]
    written = {p.name for p in done[:at] if isinstance(p, Path) and p.parent == tmp} # the manifest had another name
    assert {'config.json', 'model.safetensors'} < written and len(written) == 3 and done[at-1] == tmp
    assert done[at+1] == tmp_path and done[at+2][0].name == 'gated-00000100' # the name was there before an old one went

# ---- folders that a stranger made

SHAPE = LMConfig(vocab=5, n_layer=2, d_model=8, n_head=2, n_persistent=3, seg_len=6, mem_len=4)

def foreign(folder, files, **parts): # a model with right hashes of these files, whatever their names
    torch.manual_seed(0)
    LM(SHAPE).save_pretrained(folder, **parts)
    manifest = json.loads((folder/'manifest.json').read_text())
    for name, data in files.items():
        if data is not None: (folder/name).write_bytes(data)
        try: manifest['files'][name] = hashlib.sha256((folder/name).read_bytes()).hexdigest()
        except (OSError, ValueError): manifest['files'][name] = hashlib.sha256(b'{}').hexdigest()
    (folder/'manifest.json').write_text(json.dumps(manifest))
    return folder

@pytest.mark.parametrize('name', ('../outside.json', '{outside}', 'a/b.json', 'a\\b.json', '.hidden.json', 'two.dots.json', 'x.py', 'x', '', '..',
                                  'x.json\n', 'x\n.json', 'x.json ', '\u00e9.json', '\0.json', '~.json', 'x.JSON', 'manifest.json/'))
def test_names_that_lead_elsewhere_are_refused(tmp_path, name):
    (tmp_path/'outside.json').write_text('{}')
    folder = foreign(tmp_path/'m', {name.format(outside=tmp_path/'outside.json'): None})
    before = state(tmp_path)
    for use in (load, verify, LM.from_pretrained, lambda m: read(m, 'config.json')):
        with pytest.raises(OSError, match='m: manifest.json is damaged'): use(folder)
    assert state(tmp_path) == before

@pytest.mark.parametrize('name', ('../outside', '/outside', 'a/b', 'two.dots', '', 'x\n'))
def test_names_that_would_not_open_are_not_written(tmp_path, name):
    (tmp_path/'outside.json').write_text('{}')
    before = state(tmp_path)
    with pytest.raises(ValueError, match='part='): save(tmp_path/'m', {}, **{name.replace('/outside', f'{tmp_path}/outside'): {}})
    with pytest.raises(ValueError, match='phase='): save_step(tmp_path/'steps', name or '/', 3, {})
    with pytest.raises(ValueError, match='file='): seal(tmp_path, [f'{name}.json'])
    assert state(tmp_path) == before

def test_parts_of_any_allowed_name_come_back(tmp_path): # even those that are called like an argument
    parts = {name: [name] for name in ('path', 'folder', 'self', 'data', 'a-b', '_', '3')}
    save(tmp_path/'m', dict(a=1), **parts)
    assert load(tmp_path/'m') == (dict(a=1), parts)

@pytest.mark.parametrize('name,data', (('config.safetensors', None), ('Config.json', b'{}'), ('model.json', b'[]')))
def test_two_files_of_one_name_are_refused(tmp_path, name, data):
    data = data or (foreign(tmp_path/'other', {})/'model.safetensors').read_bytes()
    with pytest.raises(OSError, match='two files are called'): load(foreign(tmp_path/'m', {name: data}))

def test_a_link_is_read_like_a_file_and_never_written(tmp_path): # as in a cache of downloads, whose files are links
    (tmp_path/'blob').write_text('{"a": 1}'), (tmp_path/'secret').write_text('{"a": 2}'), (tmp_path/'folder').mkdir()
    folder = foreign(tmp_path/'m', {'note.json': b'{"a": 1}'})
    (folder/'note.json').unlink(), (folder/'note.json').symlink_to('../blob')
    (tmp_path/'linked').symlink_to(folder)
    before = state(tmp_path)
    assert load(folder)[1]['note'] == load(tmp_path/'linked')[1]['note'] == dict(a=1)
    config, parts = load(folder)
    save(tmp_path/'copy', config, **parts)
    assert not (tmp_path/'copy'/'note.json').is_symlink() and before.items() <= state(tmp_path).items()
    for target, said in (('../secret', 'note.json is damaged'), ('../folder', 'note.json is missing'), ('nowhere', 'note.json is missing'), ('/dev/zero', 'note.json is missing')):
        (folder/'note.json').unlink(), (folder/'note.json').symlink_to(target)
        with pytest.raises(OSError, match=said): load(folder)

def test_checkpoints_behind_a_link(tmp_path):
    (tmp_path/'outside').mkdir(), steps(tmp_path/'outside', 100, 200)
    (tmp_path/'outside'/'.x.tmp-allatt_prune-0a1b2c3d').write_text('precious')
    (tmp_path/'here').symlink_to(tmp_path/'outside')
    before = state(tmp_path)
    for use in (lambda: steps(tmp_path/'here', 300), lambda: newest(tmp_path/'here', 'gated'), lambda: saved_steps(tmp_path/'here')):
        with pytest.raises(OSError, match='here: a link'): use()
    assert state(tmp_path) == before

@pytest.mark.parametrize('data', (b'[' * 100_000, b'\xff', b'{', b'', b'NaN1'))
@pytest.mark.parametrize('name', ('manifest.json', 'note.json', 'model.safetensors'))
def test_files_that_hold_something_else_are_refused_in_one_line(tmp_path, name, data):
    folder = foreign(tmp_path/'m', {name: data} if name != 'manifest.json' else {})
    if name == 'manifest.json': (folder/name).write_bytes(data)
    with pytest.raises(OSError, match=f'm: {name} is damaged') as e: load(folder)
    assert len(str(e.value)) < 500 and '\n' not in str(e.value)

HUGE = 10**6, 10**9, 10**12, 10**18, 10**40, -1, 0, 1.5, '4', None, [], {}, True, [1] * 10_000

@pytest.mark.parametrize('field', ('vocab', 'n_layer', 'd_model', 'n_head', 'n_persistent', 'd_ff', 'mem_len', 'heads', 'cutoffs', 'unknown', 'heads[0]', 'cutoffs[0]'))
def test_forged_sizes_are_refused_at_once(tmp_path, field):
    torch.manual_seed(0)
    LM(SHAPE).save_pretrained(tmp_path/'m')
    config, parts = load(tmp_path/'m')
    LM.from_pretrained(tmp_path/'m')                                       # imports what it needs
    for i, x in enumerate(HUGE):
        name, forged = field.split('[')[0], [x, 2] if '[' in field else x
        if forged == config.get(name, 'no such setting') or (name, x) == ('cutoffs', {}) or name in ('heads', 'd_ff') and not x or name == 'heads' and x is True: continue
        save(tmp_path/f'{i}', config | {name: forged}, **parts)
        since = time.monotonic()
        with pytest.raises((OSError, ValueError)) as e: LM.from_pretrained(tmp_path/f'{i}')
        assert time.monotonic() - since < 2 and '\n' not in str(e.value) and len(str(e.value)) < 500, (field, x)

@pytest.mark.parametrize('config', ([], 'x', None, 3, {}, [1, 2]))
def test_a_configuration_that_is_none_is_refused(tmp_path, config):
    save(tmp_path/'m', config, model=LM(SHAPE).state_dict())
    with pytest.raises(OSError, match='m: config.json or model is damaged'): LM.from_pretrained(tmp_path/'m')
    save(tmp_path/'no-model', vars(SHAPE) | dict(d_head=0))
    save(tmp_path/'odd-model', {f: x for f, x in vars(SHAPE).items() if f in SHAPE.__dataclass_fields__}, model=['pos'])
    for name in ('no-model', 'odd-model'):
        with pytest.raises(OSError): LM.from_pretrained(tmp_path/name)

# ---- file systems, and writers that live or not

def test_a_folder_that_cannot_be_synced(tmp_path, monkeypatch):
    fsync, wrong = os.fsync, set()
    def broken(fd):
        if stat.S_ISDIR(os.fstat(fd).st_mode) == broken.folders: raise OSError(errno.EINVAL, 'Invalid argument')
        fsync(fd)
    broken.folders = True
    monkeypatch.setattr(os, 'fsync', broken)
    save(tmp_path/'m', {}), write_file(tmp_path/'x', b'x'), steps(tmp_path/'steps', 1, 2, 3)
    verify(tmp_path/'m')
    broken.folders = False                                                 # but a file that does not reach the disk is an error
    for write in (lambda: save(tmp_path/'n', {}), lambda: write_file(tmp_path/'y', b'y')):
        with pytest.raises(OSError): write()
    assert names(tmp_path) == ['m', 'steps', 'x']

def test_an_old_folder_that_cannot_be_renamed_is_kept(tmp_path, monkeypatch):
    steps(tmp_path, 100, 200)
    lower, rename = {str(p) for p in tmp_path.iterdir()}, os.rename        # as in the layer of an image
    def renamed(a, b):
        if str(a) in lower: raise OSError(errno.EXDEV, 'Invalid cross-device link')
        rename(a, b)
    monkeypatch.setattr(os, 'rename', renamed)
    steps(tmp_path, 300, 400, 500)
    assert names(tmp_path) == [f'gated-00000{n}00' for n in (1, 2, 4, 5)]
    for p in tmp_path.iterdir(): verify(p)

def test_a_step_can_be_saved_again(tmp_path):
    steps(tmp_path, 100, 200)
    for i in range(5):
        save_step(tmp_path, 'gated', 200, dict(step=200, more=i))
        assert newest(tmp_path, 'gated')[0] == dict(step=200, more=i) and len(names(tmp_path)) == 2
    steps(tmp_path, 300, 400)
    assert names(tmp_path) == ['gated-00000300', 'gated-00000400']

WRITER = """
import sys, time
from allatt_prune.engine.checkpoint import new_folder
with new_folder(sys.argv[1]) as tmp:
    print(tmp.name, flush=True)
    sys.stdin.readline()
    (tmp/'a.json').write_text('{}')
"""

def test_the_remains_of_writers_of_that_name_go(tmp_path):
    def start(name): return subprocess.Popen([sys.executable, '-c', WRITER, str(tmp_path/name)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    dead, other, living = jobs = start('r'), start('r-2'), start('r')
    tmp = [job.stdout.readline().strip() for job in jobs]
    for job in (dead, other): job.kill(), job.wait()
    assert {*tmp} == {*names(tmp_path)}
    save(tmp_path/'r', dict(a=1))
    assert names(tmp_path) == sorted((tmp[1], 'r'))                        # another name's remains stay
    assert living.communicate('\n', timeout=60)[1] and living.returncode   # this name is taken now
    assert names(tmp_path) == sorted((tmp[1], 'r')) and load(tmp_path/'r') == (dict(a=1), {})
    sweep(tmp_path)
    assert names(tmp_path) == ['r']
