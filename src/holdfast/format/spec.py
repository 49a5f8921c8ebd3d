"""Every number of docs/format.md, in its order. Change both or neither."""

FORMAT_VERSION = 1

# 1. A checkpoint is a directory
MANIFEST_NAME = "MANIFEST"
PENDING_MANIFEST_PREFIX = ".manifest-"
DATA_DIRECTORY = "data"
# What ".metadata" holds beside a MANIFEST: no opcode of a pickle is "#".
MARKER = b"# holdfast checkpoint: see MANIFEST. Read it with holdfast, not with torch alone.\n"

# 3. Tensors, shards, chunks
DIMENSIONS_MAX = 64
TENSOR_BYTES_MAX = (1 << 63) - 1
CHUNK_ELEMENTS_MAX = 1 << 20
PAYLOAD_BYTES_MAX = (1 << 24) - 1  # 24 bits of chunk.size_mode
MODE_RAW = 0
CODEC_RAW = "raw"
CODEC_LOSSLESS = "lossless"
CODEC_EXCP = "excp"
CODEC_COMPACT = "compact"
BASE = "base"  # the same tensor in the checkpoint that a link was made from
OTHER_BASE = "other_base"  # of the chunk that is referred to
REPLAYED = "replayed_exp_avg"  # what the second moment that is referred to refers to
_LOSSLESS = {1: (), 2: (), 3: (), 4: ("exp_avg_sq",), 5: ("master",), 6: (BASE,), 7: (BASE,)}
_REPLAY = {9: ("exp_avg", BASE, OTHER_BASE), 16: ("exp_avg_sq", BASE, REPLAYED)}
_COMPACT = {8: (), 10: ("exp_avg_sq",), 11: (BASE,), 12: ("exp_avg_sq", BASE), 17: (BASE,)}
_EXCP = {13: (BASE,), 14: ("master", "weight", OTHER_BASE), 15: ("exp_avg",)}
# Modes besides 0, and what a chunk of that mode refers to: bases, and the first of these roles that
# the group has.
MODES: dict[str, dict[int, tuple[str, ...]]] = {
    CODEC_RAW: {},
    CODEC_LOSSLESS: _LOSSLESS | _REPLAY,
    CODEC_EXCP: _LOSSLESS | _EXCP,
    CODEC_COMPACT: _LOSSLESS | _COMPACT,
}
FURTHER = (BASE, OTHER_BASE, REPLAYED)  # that are no roles of the group
MODE_ROUNDED = 5  # the one whose payload is empty
MODE_UNCHANGED = 7  # the one whose payload is a digest
MODE_REPLAY_MOMENT = 9
MODE_REPLAY_WEIGHT = 16  # refers to a chunk of mode 9, and to what that refers to
REFERENCE_BYTES_MAX = 15 << 20  # from a payload to the end of one that refers to it, or back
REFERENCE_DEPTH_MAX = 3
FEATURE_BASE = "base"
FEATURE_LOSSES = "losses"
FEATURE_VALUES = "values"
# Its tags; those of torch's types are known without torch too.
VALUE_TAGS = {
    *("$bytearray", "$bytes_io", "$ordered_dict", "$default_dict", "$set", "$frozenset", "$range"),
    *("$deque", "$path", "$datetime", "$date", "$time", "$timedelta", "$timezone", "$decimal"),
    *("$fraction", "$namespace", "$ndarray", "$numpy", "$enum", "$dataclass"),
    *("$dtype", "$device", "$size"),
}
CHAIN_LINKS_MAX = 64  # checkpoints below one
BASE_NAME_BYTES_MAX = 255

# 4. Data file
DATA_MAGIC = b"\x89HFD\r\n\x1a\n"
FOOTER_MAGIC = b"\x89HFF\r\n\x1a\n"
TRAILER_MAGIC = b"\x89HFE\r\n\x1a\n"
DATA_HEADER_BYTES = 64
TRAILER_BYTES = 32
SMALL_ALIGN_BYTES = 64  # one cache line; the unit of chunk.offset
LARGE_ALIGN_BYTES = 4096  # O_DIRECT on 4 KiB-sector disks; ext4 refuses at write, not at open
LARGE_PAYLOAD_BYTES = 1 << 16  # in mode 0; from here on, alignment wastes at most 1/16
GAP_BYTES_LIMIT = LARGE_ALIGN_BYTES  # every gap is shorter: alignment never needs more
DATA_FILE_BYTES_MAX = 1 << 38  # 2^32 units of 64 bytes
FOOTER_CHUNK = (1 << 64) - 1  # the chunk number that seeds the footer's checksum

# 5. MANIFEST, 6. Table
MANIFEST_MAGIC = b"\x89HFM\r\n\x1a\n"
PREAMBLE_BYTES = 72
TABLE_CHECKSUM_BYTES = 16
PACKED_RATIO_MAX = 64  # of a table; real ones reach 6
PATH_BYTES_MAX = 4096
PATH_KEYS_MAX = 128
JSON_DEPTH_MAX = 64
JSON_INTEGER_MAX = 1 << 53  # larger ones are tagged: many JSON readers hold them in a binary64
INTEGER_DIGITS_MAX = 4300  # of one with a tag: what Python reads without being told to

# 8. Signature
SIGNATURE_NAME = "SIGNATURE"
SIGNATURE_MAGIC = b"\x89HFS\r\n\x1a\n"
SIGNATURE_VERSION = 1
SIGNED_DIGEST_BYTES = 32  # BLAKE3
PUBLIC_KEY_BYTES = 32  # Ed25519, RFC 8032
SIGNATURE_BYTES = 64
SIGNATURE_BYTES_MAX = 1 << 30  # of the file

# 7. What a reader checks
MANIFEST_BYTES_MAX = 1 << 30  # a larger one is an attack, not a checkpoint
HEADER_BYTES_MAX = 256 << 20
