"""A model of a disk that loses power: what of the recorded calls it still holds.

POSIX promises little: a file's content is on the disk after fsync of the file, a name after fsync of its folder. Everything else may be there
or not. The model keeps, for each file and folder, what was synced and the changes since, and a power loss takes changes away in one of the `LOSSES`.
"""

import dataclasses
import itertools


@dataclasses.dataclass
class File:
    data: bytearray = dataclasses.field(default_factory=bytearray)
    synced: bytes = b""
    changes: list = dataclasses.field(default_factory=list)  # (offset, bytes), or (size, None) of a truncation

    def change(self, offset, data):
        self.changes.append((offset, data))
        changed(self.data, offset, data)

    def sync(self):
        self.synced, self.changes = bytes(self.data), []

    def after(self, count, tears):
        """The content with the first changes since the last sync; with `tears` also half of the next one."""
        data = bytearray(self.synced)
        for offset, written in self.changes[:count]:
            changed(data, offset, written)
        if tears and count < len(self.changes):
            offset, written = self.changes[count]
            changed(data, offset, written[: len(written) // 2] if written is not None else written)
        return bytes(data)

    def with_holes(self):
        """As long as it was said to be, with zeros where it was not synced."""
        return self.synced[: len(self.data)] + bytes(max(0, len(self.data) - len(self.synced)))


def changed(data, offset, written):
    if written is None:
        del data[offset:]
        data.extend(bytes(offset - len(data)))
        return
    data.extend(bytes(max(0, offset - len(data))))
    data[offset : offset + len(written)] = written


@dataclasses.dataclass
class Folder:
    entries: dict = dataclasses.field(default_factory=dict)
    synced: dict = dataclasses.field(default_factory=dict)
    changes: list = dataclasses.field(default_factory=list)  # (moment, {name: what is there now, or None})

    def change(self, moment, names):
        self.changes.append((moment, names))
        renamed(self.entries, names)

    def sync(self):
        self.synced, self.changes = dict(self.entries), []

    def after(self, is_kept):
        """The entries with those changes whose moment is kept, up to the first that is not."""
        entries = dict(self.synced)
        for _, names in itertools.takewhile(lambda change: is_kept(change[0]), self.changes):
            renamed(entries, names)
        return entries


def renamed(entries, names):
    for name, node in names.items():
        entries.pop(name, None)
        if node is not None:
            entries[name] = node


class Disk:
    """The files below `root`, a path of the records; at first those of `begun`, which are all on the disk."""

    def __init__(self, root, begun=None):
        self.root, self.top, self.moment, self.last_sync = root, Folder(), 0, 0
        for path in sorted(begun.rglob("*")) if begun else ():
            node = Folder() if path.is_dir() else File(bytearray(path.read_bytes()))
            self.put(list(path.relative_to(begun).parts), node)
        self.sync_all(self.top)

    def sync_all(self, node):
        node.sync()
        for below in node.entries.values() if isinstance(node, Folder) else ():
            self.sync_all(below)

    def apply(self, call):
        self.moment += 1
        paths = [self.parts(path) for path in (call.path, call.second) if path]
        if call.result < 0 or any(parts is None for parts in paths):
            return
        act = getattr(self, call.kind.replace("-", "_"), None)
        if act:
            act(call, *paths)

    def parts(self, path):
        """The names below the root; None for other paths, and for a file that has no name any more."""
        if path.endswith(" (deleted)") or not (path + "/").startswith(self.root + "/"):
            return None
        return path[len(self.root) + 1 :].split("/") if path != self.root else []

    def node(self, parts):
        found = self.top
        for part in parts:
            found = found.entries[part]
        return found

    def put(self, parts, node):
        self.node(parts[:-1]).change(self.moment, {parts[-1]: node})

    def create(self, call, parts):
        self.put(parts, File())

    def truncate(self, call, parts):
        self.node(parts).change(0, None)

    def ftruncate(self, call, parts):
        self.node(parts).change(call.offset, None)

    def write(self, call, parts):
        self.node(parts).change(call.offset, call.data)

    def fsync(self, call, parts):
        self.node(parts).sync()
        self.last_sync = self.moment

    fdatasync = fsync

    def mkdir(self, call, parts):
        self.put(parts, Folder())

    def unlink(self, call, parts):
        self.put(parts, None)

    rmdir = unlink

    def link(self, call, parts, other):
        self.put(other, self.node(parts))

    def rename(self, call, parts, other):
        node = self.node(parts)
        if parts[:-1] == other[:-1]:
            self.node(parts[:-1]).change(self.moment, {parts[-1]: None, other[-1]: node})
        else:
            self.put(other, node)
            self.put(parts, None)

    def exchange(self, call, parts, other):
        here, there = self.node(parts), self.node(other)
        if parts[:-1] == other[:-1]:
            self.node(parts[:-1]).change(self.moment, {parts[-1]: there, other[-1]: here})
        else:
            self.put(parts, there)
            self.put(other, here)

    def mmap_to_write(self, call, parts):
        raise NotImplementedError(f"{call.path} is mapped to write: the model does not know what reaches the disk")

    def left(self, loss, random):
        """Files and folders after a power loss: {path: bytes, or None for a folder}."""
        content, entries = LOSSES[loss](self, random)
        found = {}

        def walk(node, path):
            for name, child in entries(node).items():
                below = f"{path}/{name}" if path else name
                found[below] = None if isinstance(child, Folder) else content(child)
                if isinstance(child, Folder):
                    walk(child, below)

        walk(self.top, "")
        return found


def only_synced(disk, random):
    return lambda file: file.synced, lambda folder: folder.synced


def everything(disk, random):
    return lambda file: bytes(file.data), lambda folder: folder.entries


def torn(disk, random):
    """Names are all there; of each file's unsynced writes some, and half of the next."""
    return lambda file: file.after(random.randint(0, len(file.changes)), True), lambda folder: folder.entries


def journalled(disk, random):
    """As on ext4: a sync writes all names changed before it, later ones in their order; contents that were not synced are zeros, or empty."""
    last = random.randint(disk.last_sync, disk.moment)
    content = lambda file: random.choice([file.synced, file.with_holes(), bytes(file.data)])
    return content, lambda folder: folder.after(lambda moment: moment <= last)


def mixed(disk, random):
    """Each file and folder for itself has some of its changes."""

    def entries(folder):
        kept = random.randint(0, len(folder.changes))
        moments = [moment for moment, _ in folder.changes[:kept]]
        return folder.after(lambda moment: moment in moments)

    return lambda file: file.after(random.randint(0, len(file.changes)), random.random() < 0.5), entries


LOSSES = {each.__name__: each for each in (only_synced, everything, torn, journalled, mixed)}


def lay_out(left, folder):
    """Makes a folder hold exactly these files and folders."""
    for path in sorted(folder.rglob("*"), reverse=True):
        if str(path.relative_to(folder)) not in left:
            path.rmdir() if path.is_dir() else path.unlink()
    for name, data in sorted(left.items()):
        path = folder / name
        if data is None:
            path.mkdir(exist_ok=True)
        elif not path.is_file() or path.read_bytes() != data:
            path.write_bytes(data)
