"""Runs in a Python that waits for its script, where `site` looks for this module: after everything is set up, before the script is opened.

It imports what scripts commonly begin with and hides it again, waits for the word, takes over environment, directory and input, and leaves
nothing behind. What is hidden comes back when it is imported, if that would have loaded the very same files; see Hidden. Whatever has
changed since that a start depends on makes it start afresh, in this very process.
"""

import builtins
import os
import posix
import sys

TOKEN, MESSAGE = 3, 4
# Whoever runs one program after the other is not to share the processor with imports that nobody will use.
QUIET_MS = 100
bootstrap = sys.modules["_frozen_importlib"]
external = sys.modules["_frozen_importlib_external"]


class Hidden:
    """Modules that are loaded and not shown, with what each of them imported, in this order, and what it registered."""

    def __init__(self):
        self.modules = {}
        self.uses = {}
        self.files = {}
        self.names = {}
        self.registered = {}
        self.shown = set()
        self.finders = list(sys.meta_path)
        self.load = builtins.__import__
        self.lock = sys.modules["_thread"].RLock()

    def hide(self, before, uses):
        for name in [name for name in sys.modules if name not in before]:
            self.modules[name] = sys.modules.pop(name)
            self.names[name] = list(getattr(self.modules[name], "__dict__", ()))
        for name, module in self.modules.items():
            parent, _, child = name.rpartition(".")
            if parent:
                uses[name] = {parent: None, **uses.get(name, {})}
                owner = self.modules.get(parent) or sys.modules.get(parent)
                if owner is not None and owner.__dict__.get(child) is module:
                    delattr(owner, child)
            spec = getattr(module, "__spec__", None)
            if parent and getattr(spec, "name", None) != name:
                # Not loaded by this name, but put there by its parent.
                uses.setdefault(parent, {})[name] = None
            origin = getattr(spec, "origin", None)
            if origin and origin.startswith("/"):
                self.files[name] = signature(origin)
        for name in self.modules:
            self.uses[name] = self.loaded_by(name, uses)
        # Those of a module that could not be loaded are dropped with it.
        for name in [name for name in self.registered if name in before]:
            self.register(name)

    def loaded_by(self, name, uses):
        """What an import of this loads, in the order in which that is done: each behind what it imports itself."""
        loaded, begun, left = [], {name}, [(name, iter(uses.get(name, ())))]
        while left:
            name, more = left[-1]
            for used in more:
                if used in self.modules and used not in begun:
                    begun.add(used)
                    left.append((used, iter(uses.get(used, ()))))
                    break
            else:
                loaded.append(name)
                left.pop()
        return loaded

    def may_show(self, name, search):
        """Whether an import now would find and load just what was loaded, and all of it is still at hand."""
        if sys.meta_path[: len(self.finders)] != self.finders or builtins.__import__ is not self.load:
            return False
        before = []
        if search is not None:
            for entry in sys.path:
                if entry == search:
                    break
                finder = sys.path_importer_cache.get(entry)
                if finder is not None:
                    names = getattr(finder, "_path_cache", None)
                    if names is None:
                        return False
                    before.append(names)
        for used in self.uses[name]:
            module = self.modules.get(used)
            shown = sys.modules.get(used, self)
            if module is None or (shown is not self and shown is not module):
                return False
            if shown is self:
                if used in self.shown:
                    return False
                if "." not in used and any(used in names or any(used + suffix in names for suffix in SUFFIXES) for names in before):
                    return False
                if used in self.files and signature(self.files[used][0]) != self.files[used]:
                    return False
        return True

    def show(self, name):
        # Two threads may come with what both of them use.
        with self.lock:
            new = [used for used in self.uses[name] if used == name or used not in sys.modules]
            # Each is whole before anybody sees it.
            for used in new:
                parent = used.rpartition(".")[0]
                if parent in new:
                    self.join(used, self.modules[parent])
            for used in new:
                self.put_in_order(used)
                if used in FRESH and used not in self.shown:
                    FRESH[used](self.modules[used])
            for used in new:
                sys.modules[used] = self.modules[used]
                parent = used.rpartition(".")[0]
                if parent and parent not in new:
                    self.join(used, sys.modules.get(parent))
                # Once only: whoever removes it and imports it again wants another one.
                self.shown.add(used)
                self.register(used)

    def register(self, name):
        for register, rest, named in self.registered.pop(name, ()):
            register(*rest, **named)

    def join(self, name, owner):
        """Under its parent's name there may be what the import keeps the place with."""
        if owner is not None:
            setattr(owner, name.rpartition(".")[2], self.modules[name])

    def put_in_order(self, name):
        """Its parts have come back behind all its names."""
        names = getattr(self.modules[name], "__dict__", {})
        if name not in self.shown and list(names) != self.names[name]:
            values = dict(names)
            names.clear()
            names.update((name, values.pop(name)) for name in self.names[name] if name in values)
            names.update(values)


class Shown:
    """The loader of a hidden module. To all but an import it is what the file's own loader is."""

    def __init__(self, hidden, name, loader):
        self.hidden, self.name, self.loader = hidden, name, loader

    def __getattr__(self, attribute):
        return getattr(self.loader, attribute)

    def create_module(self, spec):
        return None

    def exec_module(self, module):
        self.hidden.show(self.name)


def signature(path):
    try:
        found = posix.stat(path)
    except OSError:
        return (path, None)
    return (path, found.st_mtime_ns, found.st_ino, found.st_size)


def fresh_logging(module):
    module._startTime = module.time.time()


def fresh_patterns(module):
    module.purge()


# What a module drew or noted when it was loaded, or keeps of those that were loaded after it.
FRESH = {"random": lambda module: module.seed(), "logging": fresh_logging, "re": fresh_patterns}
SUFFIXES = [".py", ".pyc"] + sys.modules["_imp"].extension_suffixes()


def for_import():
    """Whether it is an import that asks, and not a program that goes on by itself with what is found."""
    frame = sys._getframe(2)
    while frame is not None and (frame.f_globals is bootstrap.__dict__ or frame.f_globals is external.__dict__):
        if frame.f_code is bootstrap._find_and_load_unlocked.__code__:
            return True
        frame = frame.f_back
    return False


def offer(hidden, finder, search):
    """Has a finder answer for what is hidden."""
    find = finder.find_spec

    def find_spec(name, *rest):
        spec = find(name, *rest)
        if spec is not None and name in hidden.modules and name not in hidden.shown and for_import():
            real = hidden.modules[name].__spec__
            if real is not None and real.name == name and real.origin == spec.origin and hidden.may_show(name, search):
                shown = bootstrap.ModuleSpec(name, Shown(hidden, name, spec.loader), origin=spec.origin)
                shown.submodule_search_locations = spec.submodule_search_locations
                shown._set_fileattr = spec._set_fileattr
                shown.cached = spec.cached
                return shown
        return spec

    finder.find_spec = find_spec


def told():
    """Whether the word has come, without waiting for it."""
    try:
        return posix.read(TOKEN, 1) == b"\n" or posix._exit(3)
    except BlockingIOError:
        return False


def told_soon():
    """Whether the word comes before it has been quiet for a while."""
    if "select" in sys.builtin_module_names and "select" not in sys.modules:
        import select

        del sys.modules["select"]
        poll = select.poll()
        poll.register(TOKEN, select.POLLIN)
        poll.poll(QUIET_MS)
    return told()


def warm(names):
    """Imports these, as long as nobody waits. Returns what is hidden of them, and whether somebody does."""
    word = told_soon()
    hidden, uses, before = Hidden(), {}, set(sys.modules)
    load = builtins.__import__
    machinery = [bootstrap.__dict__, external.__dict__, globals()]

    def importer():
        """Who imports, or registers: what is written in C does it in the name of whoever loads it."""
        frame = sys._getframe(2)
        while frame is not None and any(frame.f_globals is names for names in machinery):
            frame = frame.f_back
        return frame

    def note(name, globals=None, locals=None, fromlist=(), level=0):
        module = load(name, globals, locals, fromlist, level)
        frame = importer()
        if frame is not None:
            globals = globals or frame.f_globals
            used = uses.setdefault(frame.f_globals.get("__name__"), {})
            if level:
                package = globals.get("__package__") or ""
                package = package.rsplit(".", level - 1)[0] if level > 1 else package
                name = package + "." + name if name else package
            # A package is loaded before its parts.
            parts = name.split(".")
            used.update((".".join(parts[: at + 1]), None) for at in range(len(parts)))
            for child in fromlist or ():
                name = getattr(module, "__name__", "") + "." + str(child)
                if name in sys.modules:
                    used[name] = None
        return module

    def later(register):
        """Registers when the module is shown that it is for."""

        def note(*rest, **named):
            frame = importer()
            if not warming or frame is None:
                return register(*rest, **named)
            hidden.registered.setdefault(frame.f_globals.get("__name__"), []).append((register, rest, named))
            return rest[0] if rest else None

        return note

    import atexit

    registers = [(atexit, "register", atexit.register), (os, "register_at_fork", os.register_at_fork)]
    warming = True
    for owner, name, register in registers:
        setattr(owner, name, later(register))
    builtins.__import__, sys.dont_write_bytecode, writes = note, True, sys.dont_write_bytecode
    try:
        for name in names:
            word = word or told()
            if word:
                break
            try:
                load(name)
            except Exception:
                pass
        word = word or told()
        if not word:
            import gc

            gc.collect()
    finally:
        builtins.__import__, sys.dont_write_bytecode = load, writes
        warming = False
        for owner, name, register in registers:
            setattr(owner, name, register)
    hidden.hide(before, uses)
    if not word:
        word = told()
    return hidden, word


def start_depends_on():
    """The files that a start looks at, beyond the interpreter's own."""
    import site

    places = list(sys.path)
    places += [place for place in site.getsitepackages() if place not in places]
    if site.ENABLE_USER_SITE is not False:
        places.append(site.getusersitepackages())
    noted = [signature(place) for place in places]
    runs = False
    for place in places:
        try:
            names = [name for name in posix.listdir(place) if name.endswith(".pth")]
        except OSError:
            continue
        for name in names:
            path = place + "/" + name
            noted.append(signature(path))
            with open(path, "rb") as file:
                runs = runs or any(line.startswith((b"import ", b"import\t")) for line in file)
    home = os.path.dirname(sys.executable)
    others = [sys.executable, home + "/pyvenv.cfg", os.path.dirname(home) + "/pyvenv.cfg"]
    # Those of the loader and of the C library, which has looked for the time zone by now.
    others += ["/etc/ld.so.preload", "/etc/ld.so.cache", "/etc/localtime"]
    return noted + [signature(path) for path in others], runs


def afresh(env):
    """Starts again, as if nobody had waited."""
    import _signal

    for number in (_signal.SIGPIPE, _signal.SIGXFSZ):
        _signal.signal(number, _signal.SIG_DFL)
    with open("/proc/self/cmdline", "rb") as file:
        arguments = file.read().split(b"\0")[:-1]
    for place in env.get(b"PATH", b"").split(b":"):
        if place:
            try:
                posix.execve(place + b"/python3", arguments, env)
            except OSError:
                pass
    posix._exit(127)


def interrupted():
    """Ends as one does that is interrupted before it has begun."""
    import _signal

    _signal.signal(_signal.SIGINT, _signal.SIG_DFL)
    posix.kill(posix.getpid(), _signal.SIGINT)
    posix._exit(3)


def no_input():
    """Standard input is /dev/null, as the interpreter would have made it."""
    null = posix.open("/dev/null", posix.O_RDONLY)
    posix.dup2(null, 0)
    posix.close(null)
    import io

    old = sys.stdin
    buffer = io.open(0, "rb", -1, closefd=False)
    buffer.raw.name = "<stdin>"
    new = io.TextIOWrapper(buffer, old.encoding, old.errors, "\n", old.line_buffering, old.write_through)
    new.mode = "r"
    sys.stdin = sys.__stdin__ = new


def wait():
    home = os.path.dirname(__file__)
    # All of it is read while it is there.
    with open(home + "/warm", encoding="utf-8") as file:
        names = file.read().split()
    sys.path.remove(home)
    sys.path_importer_cache.pop(home, None)
    base = dict(os.environ)
    os.set_blocking(TOKEN, False)
    if told():
        # It came while this was starting: nothing can have changed since.
        return None, [], None, base
    noted, runs = start_depends_on()
    modules = set(sys.modules)
    hidden, word = warm(names)
    if len(posix.listdir("/proc/self/task")) > 1:
        # Whoever forks would lose them.
        posix._exit(3)
    import gc

    if "gc" not in modules:
        sys.modules.pop("gc", None)
    # What nobody can reach and nothing collects is not taken apart when the interpreter ends; but what a script left in a module is, as ever.
    kept = [hidden, *(module for name, module in sys.modules.items() if name != "__main__")]
    kept.append(kept)
    del kept
    gc.freeze()
    # The script's own is taken apart as a whole.
    main = type(sys)("__main__")
    main.__dict__.clear()
    main.__dict__.update(sys.modules["__main__"].__dict__)
    sys.modules["__main__"] = main
    if not word:
        os.set_blocking(TOKEN, True)
        if posix.read(TOKEN, 1) != b"\n":
            posix._exit(3)
    return hidden, noted, runs, base


def message():
    """The directory, whether there is input, and the environment."""
    parts = posix.pread(MESSAGE, posix.fstat(MESSAGE).st_size, 0).split(b"\0")[:-1]
    posix.close(TOKEN)
    posix.close(MESSAGE)
    return parts[0], parts[1] == b"1", dict(part.split(b"=", 1) for part in parts[2:])


def take_over(hidden, noted, runs, base, directory, has_input, env):
    posix.chdir(directory)
    if not has_input:
        no_input()
    ours = ("PYTHONPATH", "PYTHONUNBUFFERED")
    same = {os.fsdecode(name): os.fsdecode(value) for name, value in env.items()}
    changed = any(base.get(name) != same.get(name) for name in {*base, *same} if name not in ours)
    if changed and runs is None:
        runs = start_depends_on()[1]
    if (runs and changed) or any(signature(entry[0]) != entry for entry in noted) or first_python(env) != os.fsencode(sys.executable):
        afresh(env)
    os.environ.clear()
    os.environ.update(same)
    posix.environ.clear()
    posix.environ.update(env)
    import site

    sys.path[:0] = [os.path.abspath(place) for place in same["PYTHONPATH"].split(":")]
    site.removeduppaths()
    if hidden is None:
        return
    for finder in (bootstrap.BuiltinImporter, bootstrap.FrozenImporter):
        offer(hidden, finder, None)
    for place, finder in list(sys.path_importer_cache.items()):
        if isinstance(finder, external.FileFinder):
            offer(hidden, finder, place if place in sys.path else None)


def first_python(env):
    for place in env.get(b"PATH", b"").split(b":"):
        if place and posix.access(place + b"/python3", posix.X_OK):
            return place + b"/python3"
    return b""


try:
    state = wait()
except KeyboardInterrupt:
    interrupted()
except BaseException:
    posix._exit(3)
told_now = message()
try:
    take_over(*state, *told_now)
except Exception:
    # From here on there is nobody else who would run it.
    afresh(told_now[2])
del sys.modules["sitecustomize"]
# The one that would have been found without this one.
import sitecustomize
