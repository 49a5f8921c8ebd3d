"""The JSON header of a table (docs/format.md §6): text ⇄ what a checkpoint says of itself.

What comes out of `decode_header` has passed every check that the header alone can be put to.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import starmap
from math import prod
from operator import attrgetter, itemgetter
from typing import Any, Literal

from .._core import read_listed
from ..errors import CorruptError, VersionError
from ..layout import ITEM_BYTES, Path, Shape, Tensor
from . import spec
from .coding import RAW, Coding, decode_coding, encode_coding, renumbered
from .fields import count, entries, keys, parse_json, scalars, text
from .links import Base, TensorLoss, decode_base, decode_losses
from .tags import MAY_BE_NATIVE, has_native
from .values import (
    decode_path,
    decode_paths,
    decode_value,
    encode_value,
    path_text,
    write_json,
)

_TOO_DEEP = f"its JSON header is nested deeper than {spec.JSON_DEPTH_MAX} levels"
_FEATURES = {
    spec.FEATURE_BASE: {"base"},
    spec.FEATURE_LOSSES: {"losses"},
    spec.FEATURE_VALUES: set[str](),
}  # the keys that a header of each has besides
REPAIRED: Path = ("repaired by holdfast",)  # the value that says what was not recovered
_SINCE = {"since": "0.1.0"}
_TENSOR_KEYS = {"path", "dtype", "shape", "codec"}
_TENSOR_VALUES = itemgetter("path", "dtype", "shape", "codec")
_KEYS = {
    *(
        "save_id",
        "step",
        "world_size",
        "mesh",
        "metrics",
        "written_by",
        "chunk_elements",
        "features",
    ),
    *("codecs", "tensors", "ties", "objects"),
}


def marked_names(mark: object, key: Literal["lost", "not_recovered"]) -> tuple[str, ...]:
    """Return what the value at `REPAIRED` lists; a value of another form lists nothing."""
    listed = mark.get(key) if isinstance(mark, dict) else None
    return tuple(n for n in listed if isinstance(n, str)) if isinstance(listed, list) else ()


_RAW_CODECS = [{"name": spec.CODEC_RAW}]
RAW_ONLY = ((), (RAW,))  # the codecs of a header that has no other
_Listed = tuple[bytes, Sequence[Path], list[int], Sequence[tuple[str, list[int], int]]]
_Written = tuple[tuple[Tensor, ...], tuple[int, ...], str]


@dataclass(frozen=True, slots=True)
class Header:
    """What the JSON header of a table says.

    Attributes:
        save_id: 32 hexadecimal digits.
        metrics: numbers that judge the step, by name.
        tensors: in the order that ``shard_tensor`` and ``ties`` count them.
        ties: (further path, index of the tensor).
        objects: (path, decoded value).
        codec_of: place in ``codecs`` of each tensor's; empty: all have the first.
        base: what chunks may refer to.
        losses: of tensors that are not what was saved.
    """

    save_id: str
    step: int | None
    world_size: int
    mesh: dict[str, Any] | None
    metrics: dict[str, float]
    written_by: str
    chunk_elements: int
    tensors: tuple[Tensor, ...]
    ties: tuple[tuple[Path, int], ...]
    objects: tuple[tuple[Path, Any], ...]
    codecs: tuple[Coding, ...] = (RAW,)
    codec_of: tuple[int, ...] = ()
    base: Base | None = None
    losses: tuple[TensorLoss, ...] = ()

    @property
    def is_repaired(self) -> bool:
        """Whether it says that something was not recovered."""
        return any(path == REPAIRED for path, _ in self.objects)

    @property
    def is_raw(self) -> bool:
        """Whether all tensors are stored as their elements."""
        return self.codecs in RAW_ONLY

    def codec(self, tensor: int) -> Coding:
        """Return how the chunks of a tensor are stored."""
        return self.codecs[self.codec_of[tensor] if self.codec_of else 0]

    def part(self, kept: Sequence[int]) -> "Header":
        """Return the header of some tensors, ascending: numbered anew, no objects, no losses."""
        if len(kept) == len(self.tensors):
            has_more = self.objects or self.losses
            return replace(self, objects=(), losses=()) if has_more else self
        anew = {index: number for number, index in enumerate(kept)}
        codecs = tuple(Coding(codec.name, renumbered(codec.groups, anew)) for codec in self.codecs)
        return replace(
            self,
            tensors=tuple(map(self.tensors.__getitem__, kept)),
            ties=tuple((path, anew[index]) for path, index in self.ties if index in anew),
            objects=(),
            losses=(),
            codecs=codecs,
            codec_of=tuple(map(self.codec_of.__getitem__, kept)) if self.codec_of else (),
        )


def encode_header(header: Header) -> bytes:
    """Write the JSON header, in the order of docs/format.md, padded.

    Raises:
        CorruptError: it is larger than readers take.
    """
    further: dict[str, Any] = {}
    if header.base:
        further["base"] = asdict(header.base)
    if header.losses:
        further["losses"] = [asdict(loss) for loss in header.losses]
    objects = ",".join(_object_texts(header)) if header.objects else ""
    features = [*map(_feature, further)] if further else []
    if '"$' in objects and MAY_BE_NATIVE.search(objects.encode()) and has_native(objects):
        features.append(_feature(spec.FEATURE_VALUES))
    first = {
        "save_id": header.save_id,
        "step": header.step,
        "world_size": header.world_size,
        "mesh": header.mesh,
        "metrics": _metric_values(header.metrics) if header.metrics else {},
        "written_by": header.written_by,
        "chunk_elements": header.chunk_elements,
        "features": features,
        **further,
        "codecs": _RAW_CODECS if header.codecs == (RAW,) else [*map(encode_coding, header.codecs)],
    }
    global _written
    latest, before = _written
    kept = latest if latest[0] is header.tensors else before
    if kept[0] is not header.tensors or kept[1] != header.codec_of:
        kept = header.tensors, header.codec_of, ",".join(_tensor_texts(header))
    if kept is not latest and len(kept[2]) <= KEPT_TEXT_MAX:
        _written = kept, latest
    ties = ",".join(_tie_texts(header)) if header.ties else ""
    begin = write_json(first)[:-1]
    text = f'{begin},"tensors":[{kept[2]}],"ties":[{ties}],"objects":[{objects}]}}'.encode()
    text += b" " * (-len(text) % 8)
    if len(text) > spec.HEADER_BYTES_MAX:
        raise CorruptError(
            f"its JSON header takes {len(text)} bytes; expected at most {spec.HEADER_BYTES_MAX}"
        )
    return text


def _metric_values(metrics: dict[str, float]) -> Any:
    """Write metrics, also those of subclasses such as numpy's float64, as numbers of JSON."""
    plain = {n: float(v) if isinstance(v, float) else int(v) for n, v in metrics.items()}
    return encode_value(plain, ("metrics",))


def _feature(key: str) -> dict[str, str]:
    """Return what readers are told of a feature: its name is that of its key."""
    return {"name": key} | _SINCE


def _tie_texts(header: Header) -> list[str]:
    return [f'{{"path":{path_text(path)},"tensor":{number}}}' for path, number in header.ties]


# The last tensors that were written, their codecs, and the text; and those before. The tensors of a
# plan are the same in every manifest, and in the footer of a file that has them all.
KEPT_TEXT_MAX = 16 << 20  # of more than some 150,000 tensors, writing takes long anyway
_written: tuple[_Written, _Written] = (((), (), ""), ((), (), ""))


def _tensor_texts(header: Header) -> list[str]:
    """Write tensors: as texts, which the garbage collector does not look at, as there are many."""
    codec_of = header.codec_of or (0,) * len(header.tensors)
    known: dict[tuple[str, Shape, int], str] = {}
    texts = []
    for tensor, codec in zip(header.tensors, codec_of, strict=True):
        form = (tensor.dtype, tensor.shape, codec)
        if (rest := known.get(form)) is None:
            values = {"dtype": tensor.dtype, "shape": tensor.shape, "codec": codec}
            rest = known[form] = write_json(values)[1:]
        texts.append(f'{{"path":{path_text(tensor.path)},{rest}')
    return texts


def _object_texts(header: Header) -> list[str]:
    """Write objects; one that stands in many places, as the options of a group do, once."""
    known: dict[int, str] = {}
    texts = []
    for path, value in header.objects:
        if (text := known.get(id(value))) is None:
            text = known[id(value)] = write_json(encode_value(value, path))
        texts.append(f'{{"path":{path_text(path)},"value":{text}}}')
    return texts


def decode_header(text: bytes) -> Header:
    """Parse and check a JSON header, its padding included.

    Raises:
        CorruptError: it is none.
        VersionError: a newer holdfast wrote it.
    """
    import gc  # only who reads a header needs it

    # Python is kept from looking for cycles: a header makes many objects, and no cycle. Of a
    # million chunks' MANIFEST that took a third of the time, with torch's objects beside.
    is_collected = gc.isenabled()
    gc.disable()
    try:
        bare = text.rstrip(b" ")
        if len(text) - len(bare) > 7:  # it is a multiple of 8 bytes
            raise CorruptError(f"its JSON header is padded by {len(text) - len(bare)} spaces")
        if (listed := read_listed(bare)) is not None:
            try:
                values, bare = parse_json(listed[0]), listed[0]
            except CorruptError:
                listed = None  # what is wrong is said of the whole text
        tagged = MAY_BE_NATIVE.search(bare) is not None
        return _decode_header(parse_json(bare) if listed is None else values, listed, tagged)
    except RecursionError as error:  # of values in values; all else has a form of few levels
        raise CorruptError(_TOO_DEEP) from error
    finally:
        if is_collected:
            gc.enable()


def _check_natives(valued: list[dict[str, Any]], named: bool) -> None:
    """Check that the feature of further values is named if, and only if, there is one."""
    if has_native(write_json([entry["value"] for entry in valued])) != named:
        what = "it has no value of it" if named else "is not named, but a value is of it"
        raise CorruptError(f"the feature {spec.FEATURE_VALUES!r}: {what}")


def _decode_header(values: Any, listed: _Listed | None, tagged: bool) -> Header:
    if not isinstance(values, dict):
        raise CorruptError("its JSON header is not an object")
    features = _check_known(values)
    if set(values) != _KEYS.union(*map(_FEATURES.__getitem__, features)):
        raise CorruptError("its JSON header does not have the keys of version 1")
    told, tied, valued = entries(values, "tensors", "ties", "objects")
    if listed is not None:
        tensors, codec_of = _listed_tensors(listed, len(values["codecs"]))
    else:
        tensors, codec_of = _decode_tensors(told, values["codecs"])
    ties = tuple(map(partial(_decode_tie, len(tensors)), tied))
    objects, coded = tuple(map(_decode_object, valued)), values["codecs"]
    if tagged or spec.FEATURE_VALUES in features:
        _check_natives(valued, spec.FEATURE_VALUES in features)
    header = Header(
        **scalars(values),
        tensors=tensors,
        ties=ties,
        objects=objects,
        codecs=(RAW,) if coded == _RAW_CODECS else (*map(partial(decode_coding, tensors), coded),),
        codec_of=codec_of if any(codec_of) else (),
        base=decode_base(values["base"]) if "base" in values else None,
        losses=decode_losses(values, len(tensors)) if "losses" in values else (),
    )
    check_paths(header)
    return header


def check_paths(header: Header) -> None:
    """Check that each path is named once.

    Raises:
        CorruptError: one is named twice.
    """
    # True == 1 in Python, but no key of a path is a bool.
    further = map(itemgetter(0), (*header.ties, *header.objects))
    paths = [*map(attrgetter("path"), header.tensors), *further]
    if len(set(paths)) != len(paths):
        raise CorruptError("its JSON header names a path twice")


def _check_known(values: dict[str, Any]) -> set[str]:
    """Tell a newer checkpoint from a damaged one; return the features it uses."""
    if values.get("features") == [] and values.get("codecs") == _RAW_CODECS:  # as most are
        return set()
    (features,) = entries(values, "features")
    for feature in features:
        keys(feature, {"name", "since"}, "feature")
    told = []
    for feature in features:
        name, since = feature["name"], feature["since"]
        told.append((text(name, "name of a feature"), text(since, "since of a feature")))
    for name, since in told:
        if name not in _FEATURES:
            raise VersionError(
                f"it uses the feature {name!r:.80}, which holdfast {since:.80} and newer read. "
                "Upgrade holdfast"
            )
    found: set[str] = set()
    for name, _ in told:
        if name in found:
            raise CorruptError(f"its JSON header names the feature {name!r} twice")
        found.add(name)
    (codecs,) = entries(values, "codecs")  # which a newer one may have otherwise
    for name in [text(codec.get("name"), "the name of a codec") for codec in codecs]:
        if name not in spec.MODES:
            raise VersionError(
                f"it uses the codec {name!r:.80}, which this holdfast does not know. "
                f"It was written by {values.get('written_by')!r:.80}; upgrade holdfast"
            )
    for codec in codecs:
        keys(codec, {"name"} if codec["name"] == spec.CODEC_RAW else {"name", "groups"}, "codec")
    return found


def _decode_tensors(
    entries: list[dict[str, Any]], codecs: list[Any]
) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    """Decode the tensors and the place of each one's codec.

    What many have in common, as layers do, is looked at once.
    """
    try:
        columns = [*zip(*map(_TENSOR_VALUES, entries), strict=True)] or [(), (), (), ()]
    except KeyError:
        columns = []
    if not columns or sum(map(len, entries)) != len(_TENSOR_KEYS) * len(entries):
        odd = next(entry for entry in entries if entry.keys() != _TENSOR_KEYS)
        keys(odd, _TENSOR_KEYS, "tensor")  # raises
    paths, dtypes, shapes, codec_of = columns
    # Of 1 and True, which are equal, texts differ.
    alike = list(map(repr, zip(dtypes, shapes, codec_of, strict=True)))
    first = dict(zip(reversed(alike), reversed(range(len(alike))), strict=True))
    known: dict[str, Shape] = {}
    for form, number in sorted(first.items(), key=itemgetter(1)):
        known[form] = _tensor_shape(len(codecs), dtypes[number], shapes[number], codec_of[number])
    found = map(Tensor, decode_paths(paths), dtypes, map(known.__getitem__, alike))
    return tuple(found), codec_of


def _listed_tensors(listed: _Listed, codecs: int) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    """Do as `_decode_tensors`."""
    _, paths, form, forms = listed
    dtypes, _, codec_of = zip(*forms, strict=True)
    shapes = [*starmap(partial(_tensor_shape, codecs), forms)]
    found = map(Tensor, paths, map(dtypes.__getitem__, form), map(shapes.__getitem__, form))
    return tuple(found), tuple(map(codec_of.__getitem__, form))


def _tensor_shape(codecs: int, dtype: Any, shape: Any, codec: Any) -> Shape:
    """Check all of a tensor but its path."""
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        raise CorruptError(f"the dtype {dtype!r:.40} is unknown")
    if not isinstance(shape, list) or len(shape) > spec.DIMENSIONS_MAX:
        raise CorruptError(f"the shape {shape!r:.80} is not a list of at most 64 dimensions")
    if count(codec, 0, "codec") >= codecs:
        raise CorruptError(f"codec {codec} is not in the table of {codecs}")
    found = _shape(shape)
    # As `spanned_bytes` says it, without a further call for each shape.
    if prod([n or 1 for n in found]) * ITEM_BYTES[dtype] > spec.TENSOR_BYTES_MAX:
        raise CorruptError(f"a tensor of shape {shape!r:.80} takes 2^63 bytes or more")
    return found


def _decode_tie(tensors: int, entry: dict[str, Any]) -> tuple[Path, int]:
    keys(entry, {"path", "tensor"}, "tie")
    if count(entry["tensor"], 0, "tie") >= tensors:
        raise CorruptError(f"a tie names tensor {entry['tensor']} of {tensors}")
    return decode_path(entry["path"]), entry["tensor"]


def _decode_object(entry: dict[str, Any]) -> tuple[Path, Any]:
    keys(entry, {"path", "value"}, "object")
    return decode_path(entry["path"]), decode_value(entry["value"])


def _shape(values: list[Any]) -> Shape:
    are_whole = set(map(type, values)) <= {int}
    if are_whole and min(values, default=0) >= 0 and max(values, default=0) < 1 << 63:
        return tuple(values)
    return tuple([count(n, 0, "a dimension") for n in values])
