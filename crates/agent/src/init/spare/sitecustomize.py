"""Runs in a Python that waits for its script, where `site` looks for this module: after everything is set up, before the script is opened.

It imports what scripts commonly begin with and hides it again, makes everything as the script will find it if it is like the one before, waits
for the word, takes over what differs, and leaves nothing behind. What is hidden comes back when it is imported, if that would have loaded
the very same files; see Hidden. Whatever has changed since that a start depends on makes it start afresh, in this very process.

The word is a line and what it announces. An empty one: nothing differs, and nothing has ever changed in /usr and /etc, nor in the directory since. A
number: so many bytes follow, with the directory, whether there is input, and the environment; without any, nothing of that differs.
"""

import builtins
import os
import posix
import sys

# Where the word comes. What is behind it is the script's.
WORD = 0
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
        self.specs = {}
        self.registered = {}
        self.shown = set()
        self.finders = list(sys.meta_path)
        self.load = builtins.__import__
        self.begun = {}

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
            spec = self.specs[name] = getattr(module, "__spec__", None)
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
                try:
                    finder = sys.path_importer_cache.get(entry or posix.getcwd())
                except OSError:
                    # A search goes on without it.
                    continue
                if finder is not None:
                    names = getattr(finder, "_path_cache", None)
                    if names is None:
                        return False
                    before.append(names)
        for used in self.uses[name]:
            module = self.modules.get(used)
            shown = module if self.under_way(used) else sys.modules.get(used, self)
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

    def under_way(self, name):
        """Whether some thread imports it: at the end of that it is taken out and put back, which nobody is to take for its removal."""
        return name in self.shown and getattr(self.begun.get(name), "_initializing", False)

    def begin(self, name, search, spec):
        """The beginning of an import: shows what it loads before its end, if that is just what was loaded.

        Finders are asked under the lock of all imports, so that no other thread decides otherwise meanwhile.
        """
        if not self.may_show(name, search):
            return False
        new = [used for used in self.uses[name] if used == name or (used not in sys.modules and not self.under_way(used))]
        # Each is whole before anybody sees it.
        for used in new:
            parent = used.rpartition(".")[0]
            if parent in new:
                self.join(used, self.modules[parent])
        for used in new:
            self.put_in_order(used)
            if used in FRESH and used not in self.shown:
                FRESH[used](self.modules[used])
        self.begun[name] = spec
        # As long as it has this one, whoever imports it as well waits.
        self.modules[name].__spec__ = spec
        for used in new:
            if used != name:
                sys.modules[used] = self.modules[used]
                parent = used.rpartition(".")[0]
                if parent and parent not in new:
                    self.join(used, sys.modules.get(parent))
                self.show(used)
        return True

    def show(self, name):
        # Once only: whoever removes it and imports it again wants another one.
        self.shown.add(name)
        self.register(name)

    def end(self, name):
        with bootstrap._ImportLockContext():
            self.show(name)
            self.modules[name].__spec__ = self.specs[name]

    def register(self, name):
        for register, rest, named in self.registered.pop(name, ()):
            register(*rest, **named)

    def join(self, name, owner):
        if owner is not None:
            setattr(owner, name.rpartition(".")[2], self.modules[name])

    def put_in_order(self, name):
        """Its parts have come back behind all its names."""
        names = getattr(self.modules[name], "__dict__", {})
        if name not in self.shown and list(names) != self.names[name]:
            known = dict.fromkeys(self.names[name])
            order = [name for name in known if name in names] + [name for name in names if name not in known]
            # By one call of what is written in C: no other thread sees it without a name that it has.
            list(map(names.__setitem__, order, map(names.pop, order)))


class Shown:
    """The loader of a hidden module. To all but an import it is what the file's own loader is."""

    def __init__(self, hidden, name, loader):
        self.hidden, self.name, self.loader = hidden, name, loader

    def __getattr__(self, attribute):
        return getattr(self.loader, attribute)

    def create_module(self, spec):
        # Not one that keeps the place: a thread that imports it at the same time has what it found there, however long it waits.
        return self.hidden.modules[self.name]

    def exec_module(self, module):
        self.hidden.end(self.name)


def signature(path):
    try:
        found = posix.stat(path)
    except OSError:
        return (path, None)
    # The one time is set as one likes, by what unpacks an archive among others; the other is not.
    return (path, found.st_mtime_ns, found.st_ctime_ns, found.st_ino, found.st_size)


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
        if spec is not None and name in hidden.modules and for_import():
            real = hidden.specs[name]
            if real is not None and real.name == name and real.origin == spec.origin:
                shown = bootstrap.ModuleSpec(name, Shown(hidden, name, spec.loader), origin=spec.origin)
                shown.submodule_search_locations = spec.submodule_search_locations
                shown._set_fileattr = spec._set_fileattr
                shown.cached = spec.cached
                shown._initializing = False
                if hidden.begin(name, search, shown):
                    return shown
        return spec

    # Two of them are classes, whose functions would be taken for methods of what is made of them.
    finder.find_spec = staticmethod(find_spec) if isinstance(finder, type) else find_spec


# The beginning of the word, once it was taken: from then on there is nobody else who would run the script.
taken = b""


def told():
    """The beginning of the word, if it has come, without waiting for it."""
    global taken
    try:
        taken = taken or posix.read(WORD, 1) or posix._exit(3)
    except BlockingIOError:
        pass
    return taken


def told_soon():
    """The beginning of the word, if it comes before it has been quiet for a while."""
    if "select" in sys.builtin_module_names and "select" not in sys.modules:
        import select

        del sys.modules["select"]
        poll = select.poll()
        poll.register(WORD, select.POLLIN)
        poll.poll(QUIET_MS)
    return told()


def warm(names):
    """Imports these, as long as nobody waits. Returns what is hidden of them, and the beginning of the word if it has come."""
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
        if told():
            # Nobody knows how long the rest takes, and a start is short.
            builtins.__import__ = load
            give_up()
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
    # What a library reads when a module is loaded that needs it.
    others += ["/etc/ssl/openssl.cnf", "/usr/lib/ssl/openssl.cnf"]
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


def environment(parts):
    """That of the script, if nothing was made of it here."""
    if parts:
        return dict(part.split(b"=", 1) for part in parts[2:])
    try:
        directory = posix.getcwdb()
    except OSError:
        directory = b"/"
    return {**posix.environ, b"PYTHONPATH": directory}


def enter(parts):
    try:
        posix.chdir(parts[0])
    except OSError:
        posix._exit(126)
    if parts[1] != b"1":
        no_input()


def give_up():
    """Ends one that can't wait. If the word was taken, the script is still to be run."""
    if not taken:
        posix._exit(3)
    os.set_blocking(WORD, True)
    parts = whole(taken)[1]
    if parts:
        enter(parts)
    afresh(environment(parts))


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


class Expected:
    """Everything is as an execution finds it that is like the one before; see take_over for the others."""

    def __init__(self, hidden, noted):
        import site

        self.path, self.places = list(sys.path), set(sys.path_importer_cache)
        self.directory = posix.getcwd()
        self.was = signature(self.directory)
        self.rest = [entry for entry in noted if not self.covers(entry)]
        lead(self.directory)
        if hidden is not None:
            for finder in (bootstrap.BuiltinImporter, bootstrap.FrozenImporter):
                offer(hidden, finder, None)
            for place, finder in list(sys.path_importer_cache.items()):
                if isinstance(finder, external.FileFinder):
                    offer(hidden, finder, place if place in sys.path else None)
        names = ["sitecustomize"] + ["usercustomize"] * bool(site.ENABLE_USER_SITE)
        self.customized = any(bootstrap._find_spec(name, None) is not None for name in names)
        # It is no place of modules; the search for that would end in the same.
        sys.path_importer_cache[sys.orig_argv[1]] = None
        self.search = site.execusercustomize
        if site.ENABLE_USER_SITE:
            # Nobody else calls it, and it is to be seen by none.
            site.execusercustomize = self.skip

    def covers(self, entry):
        """Whether it can't have changed if nothing has in /usr, /etc and the directory."""
        path, below = entry[0], self.directory.rstrip("/") + "/"
        if path.startswith(("/usr/", "/etc/")) and os.path.realpath(path).startswith(("/usr/", "/etc/")):
            return True
        return entry[1] is None and path.startswith(below) and signature(below + path[len(below) :].partition("/")[0])[1] is None

    def holds(self):
        """Whether a search for modules would still find none of those that customize a start."""
        return not self.customized and signature(self.directory) == self.was

    def skip(self):
        """In place of a search that would find nothing."""
        import site

        site.execusercustomize = self.search

    def undo(self):
        self.skip()
        sys.path[:] = self.path
        for place in set(sys.path_importer_cache) - self.places:
            del sys.path_importer_cache[place]


def lead(path):
    """These places come first, and nothing is to be said of that but where."""
    import site

    os.environ["PYTHONPATH"] = path
    posix.environ[b"PYTHONPATH"] = os.fsencode(path)
    sys.path[:0] = [os.path.abspath(place) for place in path.split(":")]
    site.removeduppaths()


def wait():
    home = os.path.dirname(__file__)
    # All of it is read while it is there.
    with open(home + "/warm", encoding="utf-8") as file:
        names = file.read().split()
    sys.path.remove(home)
    sys.path_importer_cache.pop(home, None)
    base = dict(os.environ)
    os.set_blocking(WORD, False)
    word = told()
    if word:
        # It came while this was starting: nothing can have changed since.
        os.set_blocking(WORD, True)
        return word, None, [], None, base
    noted, runs = start_depends_on()
    modules = set(sys.modules)
    hidden, word = warm(names)
    if len(posix.listdir("/proc/self/task")) > 1:
        # Whoever forks would lose them.
        give_up()
    expected = Expected(hidden, noted)
    # What is done for the first time is slow, and most programs print something.
    null = posix.open("/dev/null", posix.O_WRONLY)
    posix.write(null, b"\n")
    posix.close(null)
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
    os.set_blocking(WORD, True)
    return word or posix.read(WORD, 1) or posix._exit(3), expected, noted, runs, base


def whole(word):
    """The line, and the parts that it announces."""
    line, rest = b"", b""
    while word != b"\n":
        line += word
        word = posix.read(WORD, 1) or posix._exit(3)
    while len(rest) < int(line or 0):
        rest += posix.read(WORD, int(line) - len(rest)) or posix._exit(3)
    return line, rest.split(b"\0")[:-1]


def take_over(parts, expected, noted, runs, base):
    """Returns whether there is more to be done before the script: a search for what customizes a start."""
    env = posix.environ
    if parts:
        if expected is not None:
            expected.undo()
        enter(parts)
        env = environment(parts)
        same = {os.fsdecode(name): os.fsdecode(value) for name, value in env.items()}
        ours = ("PYTHONPATH", "PYTHONUNBUFFERED")
        if any(base.get(name) != same.get(name) for name in {*base, *same} if name not in ours):
            if start_depends_on()[1] if runs is None else runs:
                afresh(env)
        os.environ.clear()
        os.environ.update(same)
        posix.environ.clear()
        posix.environ.update(env)
        lead(same["PYTHONPATH"])
    elif expected is None:
        lead(posix.getcwd())
    for finder in sys.path_importer_cache.values():
        if isinstance(finder, external.FileFinder):
            finder.invalidate_caches()
    if any(signature(entry[0]) != entry for entry in noted) or first_python(env) != os.fsencode(sys.executable):
        afresh(env)
    if not parts and expected is not None and expected.holds():
        return False
    if not parts and expected is not None:
        expected.skip()
    return True


def first_python(env):
    for place in env.get(b"PATH", b"").split(b":"):
        if place and posix.access(place + b"/python3", posix.X_OK):
            return place + b"/python3"
    return b""


try:
    word, *state = wait()
except KeyboardInterrupt:
    interrupted()
except BaseException:
    give_up()
line, parts = whole(word)
expected = state[0]
if not line and expected is not None and not expected.customized and not expected.rest:
    # What would have been said: there is none.
    raise ModuleNotFoundError("No module named 'sitecustomize'", name="sitecustomize")
try:
    searches = take_over(parts, *state)
except Exception:
    afresh(environment(parts))
if not searches:
    raise ModuleNotFoundError("No module named 'sitecustomize'", name="sitecustomize")
del sys.modules["sitecustomize"]
# The one that would have been found without this one.
import sitecustomize
