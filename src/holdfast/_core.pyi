"""Native core of holdfast: memory, checksums, and every system call that touches a file.

Addresses are plain integers, sizes and offsets are bytes. Everything that moves bytes releases the
GIL. A failed system call raises `holdfast.errors.StoreError` (`NoSpaceError` for ENOSPC, EDQUOT
and EFBIG) with `.errno` set, an `OSError` as its cause, and the operation, path and offset in its
text; an argument that cannot be raises `OptionError`, a pool that does not fit `MemoryError`.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Buffer = bytes | bytearray | memoryview | NDArray[Any]

def xxh3_64(data: Buffer, seed: int = 0) -> int:
    """XXH3-64 of ``data``."""

def xxh3_128(data: Buffer) -> bytes:
    """XXH3-128 of ``data``: 16 bytes, little-endian."""

def hash_samples(address: int, size: int, item: int, count: int, run: int) -> bytes:
    """XXH3-128 of ``count`` runs of ``run`` bytes from the first to the last, at whole items."""

def hash_chunk(address: int, size: int, seed: int) -> tuple[int, bytes]:
    """(XXH3-64 with ``seed``, XXH3-128) of ``size`` bytes of memory, in one pass."""

def copy_and_hash_chunk(target: int, source: int, size: int, seed: int) -> tuple[int, bytes]:
    """Copy ``size`` bytes; return `hash_chunk` of the *copied* ones, in one pass.

    Twice as fast, and past the cache, from 256 KiB on where ``target`` is a multiple of 64.
    """

def checksum(address: int, size: int, seed: int) -> int:
    """XXH3-64 with ``seed`` of ``size`` bytes of memory."""

def copy(target: int, source: int, size: int) -> None:
    """memcpy without the GIL; past the cache from 256 KiB on."""

def copy_if_there(
    targets: NDArray[np.uint64],
    sources: NDArray[np.uint64],
    sizes: NDArray[np.uint64],
    threads: int,
) -> int:
    """`copy_pieces` from memory that may be taken away (unmapped) before or meanwhile.

    Returns the number of a piece that is not there, or how many pieces there are: all is copied.
    """

def copy_and_hash_if_there(
    targets: NDArray[np.uint64],
    sources: NDArray[np.uint64],
    sizes: NDArray[np.uint64],
    threads: int,
    seeds: NDArray[np.uint64],
    checksums: NDArray[np.uint64],
    digests: NDArray[np.uint64],
    known: NDArray[np.uint8],
    room: int,
    room_bytes: int,
    hurry: NDArray[np.uint8],
) -> int:
    """`copy_if_there`, which hashes each piece too: seeded, and XXH3-128 in two words.

    ``known`` says of which. None any more from when another thread makes ``hurry``, of one byte, 1.
    ``room`` is the address of memory to copy through, 4 MiB for each thread.
    """

def copy_pieces(
    targets: NDArray[np.uint64],
    sources: NDArray[np.uint64],
    sizes: NDArray[np.uint64],
    threads: int,
) -> None:
    """`copy` of each piece (addresses, bytes), by ``threads`` threads, this one among them."""

def hash_spread(
    addresses: NDArray[np.uint64],
    sizes: NDArray[np.uint64],
    counts: NDArray[np.uint64],
    seed: int,
) -> bytes:
    """XXH3-64 of samples of each item, 8 bytes for each, in the machine's order of bytes.

    An item is ``counts[i]`` parts (addresses, bytes) that follow each other; where they are cut
    makes no difference. Up to 4 KiB all bytes are hashed; of more, 3 runs of 128 bytes and one more
    for each MiB, at places that follow from the item's size and the seed.
    """

def hash_spread_strided(
    address: int, element_bytes: int, shape: Sequence[int], strides: Sequence[int], seed: int
) -> int:
    """The same number for elements in any strides (in elements), read in row-major order."""

def instruction_set() -> str:
    """What checksums and codecs use of this machine: "AVX-512", "AVX2" or "baseline"."""

def is_zero(address: int, size: int) -> bool:
    """Whether all ``size`` bytes are zero."""

def place_chunks(
    sizes: NDArray[np.uint64],
    counts: NDArray[np.uint64],
    row_bytes: NDArray[np.uint64],
    header_bytes: int,
    file_bytes: int,
    footer_bytes: int,
    window_bytes: int,
    offsets: NDArray[np.uint64],
    turns: NDArray[np.uint8],
    files: NDArray[np.uint32],
) -> list[int]:
    """Place payloads that are elements in data files; return where those of each file end.

    ``sizes`` are those of all chunks, ``counts`` the chunks of each shard, ``row_bytes`` what each
    shard takes of a footer at most. A file does not grow past ``file_bytes``, of which
    ``footer_bytes`` are kept free, by a further shard. It passes through ``window_bytes`` of memory
    (0: stands in one piece). Filled in: the offset of each chunk, whether it is the first behind a
    turn to the beginning of the window, and the file of each shard.
    """

def derive_plain(
    columns: tuple[NDArray[Any], ...],
    item_bytes: list[int],
    shapes: list[tuple[int, ...]],
    chunk_elements: int,
    world_size: int,
    out: NDArray[np.int64],
    is_cut: NDArray[np.bool_],
) -> bool:
    """Check a table whose payloads are its elements, and derive what its readers need.

    Returns False where a rule is broken, and where something is unusual (an encoded or an empty
    payload, payloads in another order): `format.manifest.check_table` looks then.

    Args:
        columns: ``file_bytes``, ``file_rank``, ``file_number``, ``file_chunks``,
            ``shard_tensor``, ``shard_file``, ``shard_first_chunk``, ``shard_chunks``,
            ``shard_box``, ``chunk_size_mode`` and ``chunk_offset`` of docs/format.md §6.
        item_bytes, shapes: of every tensor.
        out: filled in: ``chunk_elements``, ``item_bytes``, ``file_first_chunk``, ``payload_end``,
            ``shard_first_row``, ``box_start``, ``tensor_order``, ``tensor_first``,
            ``chunk_start``, ``chunk_bytes`` and ``chunk_gap_start`` of a `Manifest`, one behind the
            other.
        is_cut: filled in: of a `Manifest`.
    """

def read_listed(
    data: bytes,
) -> tuple[bytes, list[tuple[str, ...]], list[int], list[tuple[str, list[int], int]]] | None:
    """Read the tensors of a JSON header that has the one form in which holdfast writes them.

    None: it has another form, and the strict parser decides. What is read holds if that parser
    takes the rest.

    Returns:
        (rest, paths, form, forms): the header with an empty list of tensors; the path of each; the
        place in ``forms`` of each; dtype, shape and codec of each form.
    """

def stage_chunks(
    targets: NDArray[np.uint64],
    sources: NDArray[np.uint64],
    sizes: NDArray[np.uint64],
    head: bytes,
    first_row: int,
    checksums: NDArray[np.uint64],
    digests: NDArray[np.uint64],
) -> None:
    """`copy_and_hash_chunk` of many chunks, seeded for rows of a file from ``first_row`` on.

    A chunk whose source is its target is hashed where it stands; one whose source is 0 stands there
    and has its hashes. What lies between two chunks is zeroed. ``head`` is the first 24 bytes of
    what a seed is the checksum of. Filled in: checksums, and digests of two words each.
    """

def chunk_seeds(head: bytes, out: NDArray[np.uint64]) -> None:
    """Fill in the seeds of the first chunks of a file; ``head`` as for `stage_chunks`."""

def digest_shards(
    digests: NDArray[np.uint64], counts: NDArray[np.uint64], out: NDArray[np.uint64]
) -> None:
    """XXH3-128 of the digests of each shard's chunks, ``counts[i]`` of them."""

def first_damaged(
    chunks: tuple[NDArray[np.int64], ...],
    checksums: NDArray[np.uint64],
    rows: NDArray[np.int64],
    file: int,
    base: int,
    head: bytes,
) -> int:
    """Return the first chunk whose bytes or gap are not what was written, or how many there are.

    Args:
        chunks: `format.manifest.CHUNKS` of all.
        checksums: of all.
        rows: those to look at, all of ``file``.
        base: the address at which byte 0 of the file would be.
        head: `seed_head` of the file.
    """

def wake_here(thread: int) -> bytes:
    """Let a thread that sleeps wake on the CPU of this one; return where this one may run.

    Args:
        thread: its native id; 0: there is none.
    """

def run_on(cpus: bytes) -> None:
    """Let this thread run on the CPUs that `wake_here` returned; none: it runs where it did."""

class Waiter:
    """What one thread waits for; it wakes on the CPU of the thread that wakes it."""

    def wake(self) -> None:
        """End one wait: the one that is on, or the next."""

def wait_for(waiter: Waiter) -> bool:
    """Wait for one `Waiter.wake`, and return True; raise what a signal's handler raises.

    Python runs a handler only when the thread may run again where it could before.
    """

def rows_of_whole(
    columns: tuple[NDArray[Any], ...], tensors: NDArray[np.int64]
) -> tuple[bytes, bytes, bytes] | None:
    """Find the chunks of whole tensors; None where one is in several shards.

    Args:
        columns: ``tensor_order``, ``tensor_first``, ``shard_first_row``, ``shard_chunks`` and
            ``is_cut`` of a `Manifest`.

    Returns:
        what `reads_in_order` takes of every chunk.
    """

def reads_in_order(
    chunks: tuple[NDArray[np.int64], ...],
    number: NDArray[np.int64] | bytes,
    rows: NDArray[np.int64] | bytes,
    exact: NDArray[np.bool_] | bytes,
) -> tuple[bytes, bytes, bytes, bytes, bytes]:
    """Order chunks by file and place, each once, with what wants it in the order of the numbers.

    Args:
        chunks: `format.manifest.CHUNKS` of all.
        number, rows, exact: of every pair of what is wanted and a chunk of it.

    Returns:
        the columns of `plan.reads.Reads`: four of int64, and ``exact``.
    """

def join_runs(
    chunks: tuple[NDArray[np.int64], ...],
    rows: NDArray[np.int64],
    begins: NDArray[np.int64],
    bytes_max: int,
    bytes_min: int,
) -> list[tuple[int, int, int, int, int]]:
    """Join units into runs, as `plan.reads.coalesce` says it.

    A run reads over a gap of up to 64 KiB: a further request costs more. The gap is at most one
    part in 64 (1.6 %) of the run before it.

    Args:
        chunks: `format.manifest.CHUNKS` of all.
        rows: in file order.
        begins: where in ``rows`` each unit begins, which is read at once.

    Returns:
        file, offset, bytes (4 KiB-aligned), and which of ``rows``: from, to.
    """

def place_reads(
    chunks: tuple[NDArray[np.int64], ...],
    shards: tuple[NDArray[Any], ...],
    reads: tuple[NDArray[Any], ...],
    address: NDArray[np.uint64],
    base: int,
) -> tuple[bytes, bytes] | None:
    """Copy chunks of a run to where they lie in their targets as they are stored.

    Args:
        chunks: `format.manifest.CHUNKS` of all.
        shards: ``shard_first_row``, ``shard_tensor``, ``chunk_elements``, ``item_bytes``.
        reads: columns of `plan.reads.Reads`.
        address: of each target; 0: its elements do not lie as stored.
        base: the address at which byte 0 of the file would be.

    Returns:
        which of the chunks go elsewhere, and the place in ``wants`` of each: int64; or None.
    """

def overlapping(addresses: list[int], sizes: list[int]) -> list[int]:
    """Return which stretches of memory share a byte with another one. Empty ones share none."""

class Pool:
    """Page-touched, 4 KiB-aligned, huge-page-advised memory in equal slots; never moved.

    ``slot_bytes`` is rounded up to 4 KiB. fork() does not hand the memory on: a child that touches
    it dies, and in return no fork during a write moves pages under the device.
    """

    def __init__(self, slot_bytes: int, slots: int) -> None: ...
    @property
    def slot_bytes(self) -> int: ...
    @property
    def slots(self) -> int: ...
    def address(self, slot: int) -> int: ...
    def view(self, slot: int) -> memoryview:
        """The slot as writable bytes; keeps the pool alive."""

    def memory(self) -> memoryview:
        """All slots, which lie one behind the other, as writable bytes; keeps the pool alive."""

class Vfs:
    """The one seam to the operating system. Thread-safe."""

    @staticmethod
    def posix() -> Vfs: ...
    @staticmethod
    def recording() -> Vfs:
        """A real one that logs every operation that changes the disk, in order, with its bytes."""

    @staticmethod
    def faulty(rules: list[tuple[str, int, bool, str, int]], base: Vfs | None = None) -> Vfs:
        """A real one (or ``base``) that misbehaves.

        A rule is (operation, nth, persistent, action, argument). Operation is a name below or "*";
        nth counts its calls from 1 (0: never fires, only counts); a persistent rule fires at every
        call from the nth on. Actions: "fail" (argument: errno), "short" (a write or read does at
        most ``argument`` bytes), "torn" (writes the first ``argument`` bytes, then fails with
        EIO), "lie" (skip the operation and report success), "delay" (milliseconds), "kill"
        (SIGKILL to this process before the operation), "kill_after".

        A call is one system call: each block of a queued request is one, and each resumption. On an
        O_DIRECT file amounts are what a disk can do: short is at least 4 KiB, torn a multiple of
        it. A "close" closes whatever the rule.
        """

    def calls(self) -> dict[str, int]:
        """Calls so far by operation (recording and faulty only; empty otherwise)."""

    def trace(self) -> list[tuple[str, str, str, int, bytes]]:
        """The log: (operation, path, second path or "", offset or length, bytes written).

        Of files opened through this Vfs; under `faulty` what was done, not what was reported.
        """

    # Operations; their names are the names of rules.
    def create(self, path: str, direct: bool = False) -> int:
        """Open a new file for reading and writing (O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC)."""

    def open(self, path: str, direct: bool = False) -> int:
        """Open a regular file for reading; anything else fails with ELOOP or EINVAL."""

    def open_beneath(self, root: str, name: str, direct: bool = False) -> int:
        """`open` what lies below ``root``: no part of ``name`` may be a link or lead out of it.

        That holds whoever swaps directories meanwhile; ``root`` itself may be reached by links.
        """

    def close(self, fd: int) -> None: ...
    def write(self, fd: int, data: Buffer, offset: int) -> None:
        """Write all of ``data`` at ``offset``; resumes short writes and EINTR."""

    def start_sync(self, fd: int) -> None:
        """Let the disk begin with what was written, so that a `sync` waits less: a hint."""

    def start_read(self, fd: int) -> None:
        """Let the disk begin to read the file, so that a `read` waits less: a hint."""

    def wants_direct(self, fd: int, size: int) -> bool:
        """Return whether a file of so many bytes seems not to be in the page cache."""

    def read(self, fd: int, size: int, offset: int) -> bytes:
        """Read ``size`` bytes, fewer only at the end of the file."""

    def size(self, fd: int) -> int: ...
    def allocate(self, fd: int, size: int) -> None:
        """fallocate [0, size); a file system that cannot (EOPNOTSUPP) is no error."""

    def truncate(self, fd: int, size: int) -> None: ...
    def sync(self, fd: int) -> None:
        """fsync."""

    def sync_directory(self, path: str) -> None: ...
    def link(self, source: str, target: str) -> None:
        """Hard link; fails with EEXIST when ``target`` is another file."""

    def rename(self, source: str, target: str) -> None: ...
    def unlink(self, path: str) -> None: ...
    def make_directory(self, path: str) -> bool:
        """Whether it was made (False: it is there already, as a directory)."""

    def remove_directory(self, path: str) -> None: ...
    def list_directory(self, path: str, name: str = "") -> list[tuple[str, str, int]]:
        """(name, "file" | "directory" | "other", size) of each entry, sorted; links are "other".

        Of ``path``, or of what lies below it, as `open_beneath` has it.
        """

class Queue:
    """Reads and writes in flight on files of one `Vfs`; its own threads do the work.

    One caller at a time. Backends: "io_uring" (O_DIRECT, registered pool where allowed), "direct"
    (a thread pool of O_DIRECT pread and pwrite), "buffered" (the same without O_DIRECT). The file
    must be opened to match (`direct=`), and stay open, and the memory stay, until `wait` hands the
    request back. Where `direct`, addresses, sizes and offsets are multiples of 4096.
    """

    def __init__(
        self, vfs: Vfs, backend: str, pool: Pool, depth: int = 16, block_bytes: int = 2 << 20
    ) -> None:
        """At most ``depth`` operations of ``block_bytes`` are in flight; larger ones are split."""

    @property
    def backend(self) -> str: ...
    @property
    def direct(self) -> bool: ...
    @property
    def pending(self) -> int:
        """Requests submitted and not yet handed back by `wait`."""

    @property
    def fetch(self) -> None:
        """See `holdfast.stores.base.Queue`."""

    def submit_write(
        self, fd: int, address: int, size: int, offset: int, tag: int, cached: bool = False
    ) -> None:
        """Begin a write.

        Args:
            cached: the file goes through the page cache, and nothing has to be aligned. One block
                is then written in this thread, where nothing else is pending.
        """

    def submit_read(
        self, fd: int, address: int, size: int, offset: int, tag: int, cached: bool = False
    ) -> None:
        """Begin a read; ``cached`` as for a write."""

    def wait(self) -> list[tuple[int, int, int]]:
        """Block until a request is whole; return (tag, bytes done, errno) of each that is.

        Short operations are resumed inside; bytes done is less than asked only at the end of a
        file (reads) or with errno, and then counts from the request's beginning without a gap.
        Empty only when none is pending.
        """

    def close(self) -> None:
        """Finish what was submitted, end the threads. Idempotent; `wait` still hands back."""

def look_anew(path: str) -> None:
    """Have what is looked for in the directory of ``path`` next come from the server (NFS)."""

def above_with(path: str, name: str, beginning: bytes) -> str:
    """The nearest directory above ``path`` with a file ``name`` that begins so; empty: none.

    One that cannot be read counts as none. A StoreError (ENOTDIR): something above is a file.
    """

def probe(directory: str, vfs: Vfs | None = None) -> str:
    """The fastest backend that works in ``directory``: an unnamed file is written and read back.

    Tried in order: io_uring, direct, buffered. ``HOLDFAST_IO`` in the environment names one and
    skips the probe. Remembered by device, unless ``vfs`` is another than `Vfs.posix`.
    """

class Elements:
    """A run of elements of a shard, in row-major order.

    ``item_bytes`` is 1, 2, 4 or 8; ``kind`` "float", "bf16", "f16" or anything else; ``row`` the
    elements of a row of the shard, ``column`` the place of the first element in its row.
    """

    def __init__(self, count: int, item_bytes: int, kind: str, row: int, column: int) -> None: ...

def lossless_bytes_max(elements: Elements) -> int:
    """Room that `lossless_encode` needs."""

def lossless_encode(
    elements: Elements, data: int, master: int, second_moment: int, base: int, out: int
) -> tuple[int, int]:
    """Code what stands at ``data``; return (mode, bytes written to ``out``).

    ``master``, ``second_moment``, ``base``: addresses of the same elements of other tensors, and of
    an earlier checkpoint, or 0. Under mode 0 nothing was written: the elements are the payload.
    """

def lossless_encode_difference(
    elements: Elements, data: int, base: int, out: int
) -> tuple[int, int]:
    """Do the same under mode 6, or 0 where that takes no less."""

def lossless_decode(
    mode: int,
    payload: int,
    payload_bytes: int,
    elements: Elements,
    master: int,
    second_moment: int,
    base: int,
    target: int,
) -> bool:
    """Decode to ``target``; whether the payload was one of ``lossless_encode``, but for mode 0."""

def replay_bytes_max(count: int) -> int:
    """Room that `replay_encode` needs."""

def replay_fits(
    mode: int,
    data: int,
    count: int,
    base: int,
    exp_avg: int,
    exp_avg_base: int,
    exp_avg_sq: int,
) -> bool:
    """Tell whether `replay_encode` would code it, by a sample of the elements."""

def replay_encode(
    mode: int,
    data: int,
    count: int,
    base: int,
    exp_avg: int,
    exp_avg_base: int,
    exp_avg_sq: int,
    out: int,
) -> int:
    """Code f32 of a second moment (mode 9) or a weight (16) by repeating the optimizer's step.

    Addresses of the same elements of the tensor itself a step before, of first moments after and
    before it, of the second moment after it; 0 where not needed. Return the bytes written to
    ``out``; 0 where no such step led here.
    """

def replay_decode(
    mode: int,
    payload: int,
    payload_bytes: int,
    count: int,
    base: int,
    exp_avg: int,
    exp_avg_base: int,
    exp_avg_sq: int,
    target: int,
) -> bool:
    """Decode to ``target``; whether the payload was one of `replay_encode`."""

class ExcpRule:
    """How much the codec "excp" keeps, and how it finds centres; ``cap`` may be infinite."""

    def __init__(
        self,
        alpha: float,
        beta: float,
        cap: float,
        per_element: bool,
        half_centres: bool,
        optimal: bool,
    ) -> None: ...

class ExcpPart:
    """The same ``count`` elements of the f32 tensors of a unit, by address.

    ``half``: of a bf16 weight whose master ``weight`` is; or 0.
    """

    def __init__(
        self, count: int, weight: int, base: int, exp_avg: int, exp_avg_sq: int, half: int = 0
    ) -> None: ...

class ExcpSurvey:
    """What holds for all chunks of a unit. Immutable."""

    @property
    def usable(self) -> bool:
        """Whether all is finite and no second moment below 0; else the rest means nothing."""

    @property
    def rounded(self) -> bool:
        """Whether each half-precision weight is the rounding of its master."""

    @property
    def median(self) -> float:
        """Lower median of the residuals' absolute values."""

    @property
    def threshold(self) -> float:
        """Above which a residual is kept, unless each element has its own threshold."""

    @property
    def moment_threshold(self) -> float: ...
    def centres(self, role: str) -> list[float]:
        """At most 15, ascending."""

def excp_bytes_max(count: int) -> int:
    """Room that `excp_encode` needs."""

def excp_survey(parts: list[ExcpPart], rule: ExcpRule) -> ExcpSurvey:
    """Look at all chunks of a unit, three times."""

def excp_encode(
    survey: ExcpSurvey,
    role: str,
    part: ExcpPart,
    base: int,
    weight: int,
    exp_avg: int,
    out: int,
    decoded: int,
) -> int:
    """Code one tensor of a chunk; return the bytes written to ``out``, and what a reader will have.

    ``base``, ``weight``, ``exp_avg``: addresses of what a reader has decoded before; 0 if nothing.
    Returns 0 when it cannot be coded in fewer bytes than it has.
    """

def excp_decode(
    role: str,
    payload: int,
    payload_bytes: int,
    count: int,
    base: int,
    weight: int,
    exp_avg: int,
    target: int,
) -> bool:
    """Decode to ``target``, which may be the base; whether it was one of `excp_encode`."""

def measure_loss(data: int, decoded: int, base: int, count: int) -> tuple[float, float, float]:
    """Squared error and largest error of f32, and the energy of their difference from a base, or 0.

    ``base``: an address, or 0: the energy is that of the elements.
    """

def compact_bytes_max(elements: Elements) -> int:
    """Room that `compact_means`, `compact_moment` and `compact_steps` need."""

def compact_means(
    elements: Elements, data: int, rests: bool, out: int, decoded: int
) -> tuple[int, int, float, float, float]:
    """Code second moments; put what decoding gives at ``decoded``.

    Returns (mode, bytes written to ``out``, squared error, largest error, energy): the error's sum
    of squares, and that of what was coded. Under mode 0 the elements are the payload.

    Args:
        rests: each element within an octave of its own, besides the means of row and column.
    """

def compact_moment(
    elements: Elements, data: int, step: float, second_moment: int, out: int, decoded: int
) -> tuple[int, int, float, float, float]:
    """Code first moments in units of the roots of second ones; returns as `compact_means`.

    Args:
        step: in root mean squares of those units.
        second_moment: address of the decoded second moments.
    """

def compact_steps(
    elements: Elements,
    data: int,
    step: float,
    bound: str,
    limit: float,
    base: int,
    second_moment: int,
    master: int,
    exact_master: int,
    out: int,
    decoded: int,
) -> tuple[int, int, float, float, float]:
    """Code weights as steps from a base; returns as `compact_means`, the energy the residual's.

    Args:
        step: in root mean squares of the scaled residual.
        bound: "", "rel", "abs" or "bits", and with one its ``limit`` in place of the step; or
            "bf16_exact".
        base, second_moment, master: addresses of decoded f32 elements, or 0.
        exact_master: of the master before it was coded, or 0.
    """

def compact_decode(
    mode: int,
    payload: int,
    payload_bytes: int,
    elements: Elements,
    base: int,
    second_moment: int,
    master: int,
    target: int,
) -> bool:
    """Decode to ``target``; whether the payload was one of the codec, but for mode 0."""

def segment_bytes_max(items: NDArray[np.uint64]) -> int:
    """Room that `segment_encode` needs."""

def segment_encode(
    items: NDArray[np.uint64],
    head: bytes,
    out: int,
    size_modes: NDArray[np.uint32],
    offsets: NDArray[np.uint64],
    checksums: NDArray[np.uint64],
    digests: NDArray[np.uint64],
) -> tuple[int, int, float]:
    """Stage, encode and place chunks, losslessly, as they will stand in a data file.

    Args:
        items: rows of 15 numbers: address; count, item_bytes, kind (0 integer, 1 float, 2 bf16, 3
            f16), row, column of the elements; number of the chunk in its file; whether nobody
            changes what is there; how many items before this one its master and its second moment
            are, or 0 (of those that may change only the last one that another refers to is used);
            address of the base's elements, or 0; where the elements are to be put for the next
            base, or 0; whether the base's digest is known, and its two words.
        head: the first 24 bytes of what a seed is the checksum of.
        out: address of `segment_bytes_max` bytes, where a page of the file begins.
        size_modes, offsets, checksums, digests: filled in: bytes of the payload and mode << 24;
            offset from ``out`` (0 where there are no bytes); checksum; digest of the elements.

    Returns:
        (bytes up to the end of the last payload, of the largest one of mode 0, seconds that staging
        took).

    Raises:
        ValueError: an item refers to none before it, or its elements cannot be.
    """
