"""Recorded results as Markdown."""

import json
import statistics

from processes import Trouble
from sanitizers import TOOLS
from trained import TRAINED_TOKENS

WEIGHTS_BYTES = 13.48e9  # Llama 2 7B in bfloat16
HIDDEN = 4096
HEADS_BYTES = 5 * 2 * (HIDDEN * HIDDEN + HIDDEN + 32000 * HIDDEN)  # five Medusa heads of it, bfloat16
PAPERS_TOKENS = 3.47  # accepted tokens per step of Vicuna 7B (arXiv 2401.10774, table 1)


def of_file(path):
    try:
        return of(json.loads(path.read_text()))
    except (OSError, ValueError) as error:
        raise Trouble(f"{path}: {error}; expected a file that scripts/gpu_check wrote") from error


def of(results):
    """The results of one stage: what failed, then a section for each kind of line."""
    machine = results["doctor"]
    lines = [f"# {gpu_name(machine)}, {results['date']}, {results['stage']}", "", f"`{results['command']}`", ""]
    lines += [f"medusa {machine['version']}, driver {machine['cuda'].get('driver')}, runtime {machine['cuda'].get('runtime')}.", ""]
    lines += endings(results["parts"])
    told = [line for part, result in results["parts"].items() if part not in TOOLS for line in result["lines"]]
    for check in SECTIONS:
        lines += section(check, told, results)
    return "\n".join(lines).rstrip() + "\n"


def section(check, told, results):
    """The lines of one kind as text. Lines that lack what their table shows cost only this table."""
    try:
        return SECTIONS[check]([line for line in told if line.get("check") == check], told, results)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        return [f"**The table of {check} could not be made**: {type(error).__name__}: {error}", ""]


def endings(parts):
    lines = []
    for part, result in parts.items():
        if result["failed"]:
            first, _, rest = result["failed"].partition("\n")
            lines += [f"**{part} failed**: {first}", ""] + (["```", rest, "```", ""] if rest else [])
        elif result.get("skipped"):
            lines += [f"{part} was skipped: {result['skipped']}", ""]
        elif part in TOOLS:
            lines += [f"{part} found nothing.", ""]
    return lines


def gpu_name(machine):
    names = machine["cuda"]["names"]
    return names[0] if names else "gpu"


def markdown(header, rows):
    lines = ["| " + " | ".join(header) + " |", "| " + " | ".join("---" for _ in header) + " |"]
    return lines + ["| " + " | ".join(str(cell) for cell in row) + " |" for row in rows] + [""]


def whole(number):
    return "-" if number is None else f"{number:.0f}"


def gib(bytes_):
    return f"{bytes_ / 2**30:.1f}" if bytes_ else "-"


def versions(lines, _, results):
    facts = [pair for line in lines for pair in line.items() if pair[0] != "check"]
    facts += results.get("environment", {}).items() if lines else []
    return [f"- {key.replace('_', ' ') if key.islower() else key}: {value}" for key, value in facts] + [""] if lines else []


def mask(lines, *_):
    if not lines:
        return []
    crashed = [str(line["offset"]) for line in lines if line["crashed"]]
    errors = [line["error"] for line in lines if line.get("error")]
    found = f"crashes at offsets {', '.join(crashed)}" + (f" ({errors[0]})" if errors else "") if crashed else "runs at every offset"
    return [f"torch's attention with a float32 mask that begins 0 to {len(lines) - 1} elements into its row {found}.", ""]


def kernels(lines, *_):
    if not lines:
        return []
    rows = []
    for line in lines:
        worst = sorted(line["distances"].items(), key=lambda pair: -pair[1])[:3]
        heads = ", Hydra heads" if line.get("heads") == "hydra" else ""
        shape = f"{line['family']}, {line['dtype']}, D {line['head_dim']}, G {line['groups']}{heads}"
        rows.append((shape, line["nodes"], line["context"], line["acceptance"].split("(")[0].split(" ")[0], ", ".join(f"{name} {value:.1e}" for name, value in worst)))
    title = ["## Kernels and their oracle", "", "Each on the same inputs: relative distances (of integers: how many differ); the three largest.", ""]
    return title + markdown(("shape", "nodes", "context", "acceptance", "distances"), rows)


def fused(lines, *_):
    rows = [(line["operation"], f"{line['distance']:.1e}", f"{line['kernel_ms']:.2f}", f"{line['libtorch_ms']:.2f}", f"{line['gb_per_s']:.0f}") for line in lines]
    title = ["## Kernels of training and libtorch's calls", "", "Distances are relative to the largest number.", ""]
    return title + markdown(("operation", "distance", "kernel, ms", "libtorch, ms", "kernel, GB/s"), rows) if rows else []


def layers(lines, *_):
    rows = [(line["map"], line["trained"], f"{line['distance']:.1e}", line["of"], " + ".join(map(str, line["copies"]))) for line in lines]
    title = ["## Layers on several devices", "", "Two steps; distances from the numbers of one device are relative to their norm.", ""]
    return title + markdown(("layers", "trained", "distance", "largest for", "copies forward + backward"), rows) if rows else []


def operators(lines, *_):
    rows = [(line["operation"], f"{line['distance']:.1e}") for line in lines]
    title = ["## Operations that only a GPU runs", "", "Distances are relative to the largest number; of draws, the number of tokens; of the last two, 0 or 1.", ""]
    return title + markdown(("operation", "distance"), rows) if rows else []


def overlap(lines, *_):
    rows = [
        (line["family"], line["dtype"], line["head_dim"], line["heads"], line["acceptance"], line["texts"], line["differing"])
        for line in lines
        if "skipped" not in line
    ]
    title = ["## Texts of kernels that overlap, and of kernels that do not", ""]
    return title + markdown(("family", "dtype", "head size", "heads", "acceptance", "texts", "differing"), rows) if rows else []


def libtorch(lines, *_):
    return [text for line in lines for text in (f"In float32, libtorch's loop makes {'the same text' if line['same'] else 'ANOTHER text'} of {line['tokens']} tokens with a tree and without.", "")]


def equal(of):
    return f"{of['same']}" if of["margin"] is None else f"{of['same']}, then {of['margin']:.3f}"


def loops(lines, *_):
    if not lines:
        return []
    rows = [(line["family"], line["dtype"], line["head_dim"], line["groups"], line["prompt"], line["tokens"], *(equal(line[way]) for way in ("alone", "plain", "medusa"))) for line in lines]
    title = ["## Greedy texts of both loops", "", "Tokens until the first that is not the one of libtorch's loop, then by how much its logit is smaller there: in 16 bits, near ties part texts.", ""]
    return title + markdown(("family", "dtype", "D", "G", "prompt", "tokens", "without heads", "plain", "with a tree"), rows)


def hydra_texts(lines, *_):
    if not lines:
        return []
    rows = [(line["family"], line["dtype"], line["nodes"], line["tokens"], equal(line["hydra"]), line["steps"], line["libtorch_steps"]) for line in lines]
    title = ["## Hydra heads", "", "Greedy texts: tokens until the first that is not the one of libtorch's plain loop, and the steps that they took.", ""]
    return title + markdown(("family", "dtype", "nodes", "tokens", "equal", "steps", "steps with the drafter on libtorch"), rows)


def hydra_steps(lines, *_):
    return [text for line in lines for text in (f"A step of {line['nodes']} nodes of Llama 2 7B's shape with {line['heads']} Hydra heads takes {line['step_ms']:.2f} ms behind {line['context']} tokens.", "")]


def copy(lines, *_):
    text = ["## Reading the weights of Llama 2 7B's shape, bfloat16", ""] if lines else []
    for line in lines:
        copied, read = line["gigabytes_per_second"], line["read_gigabytes_per_second"]
        text += [f"A copy moves {copied:.0f} GB/s, read and written, and a sum reads {read:.0f} GB/s: at these speeds 13.5 GB of weights take {WEIGHTS_BYTES / copied / 1e6:.2f} and {WEIGHTS_BYTES / read / 1e6:.2f} ms.", ""]
    return text + ([f"A step of several nodes reads the five heads' {HEADS_BYTES / 1e9:.2f} GB, too.", ""] if lines else [])


def products(lines, _, results):
    large = [line for line in lines if line["product"]["inputs"] >= HIDDEN]  # others are of small shapes that were checked before
    rows = [product_row(line["product"], line["ways"]) for line in sorted(large, key=by_size)]
    text = ["## Products: the fastest of our kernels, and of cublasLt", ""]
    if results.get("has_old_timings"):
        text += ["target/cache had timings of an earlier run: products that are in them were not timed again.", ""]
    return text + markdown(("rows", "weight", "fused", "ours", "cublasLt", "ways"), rows) if rows else []


def by_size(line):
    return [line["product"][key] for key in ("rows", "outputs", "inputs")]


def product_row(product, ways):
    """`ways` are sorted, the fastest first."""
    fused = ["norm"] * product["normed"] + [product["written"]] * (product["written"] != "rounded")
    ours = next((way for way in ways if "cublas_lt" not in way["way"]), None)
    cublas_lt = next((way for way in ways if "cublas_lt" in way["way"]), None)
    return (product["rows"], f"{product['outputs']}x{product['inputs']}", ", ".join(fused) or "-", in_words(ours), in_words(cublas_lt), len(ways))


def in_words(timed):
    return f"{way_name(timed['way'])}: {timed['microseconds']:.1f} µs, {timed['gigabytes_per_second']:.0f} GB/s" if timed else "-"


def way_name(way):
    ((kind, of),) = way.items()
    if kind == "few":
        return f"{of['most']}/{of['split']}"
    if kind == "tile":
        return f"{of['height']}x{of['width']}" + (f"/{of['splits']}" if of["splits"] > 1 else "")
    return f"algorithm {of['algorithm']}"


def steps(lines, told, _):
    if not lines:
        return []
    contexts = sorted({line["context"] for line in lines})
    at = {(line["nodes"], line["context"]): line["step_ms"] for line in lines}
    rows = [[nodes] + [f"{at[nodes, context]:.2f}" if (nodes, context) in at else "-" for context in contexts] for nodes in sorted({nodes for nodes, _ in at})]
    theirs = {line["context"]: line["step_ms"] for line in told if line.get("check") == "transformers"}
    if theirs:
        rows.append(["transformers, 1"] + [f"{theirs[context]:.2f}" if context in theirs else "-" for context in contexts])
    text = ["## Steps of the same shape, milliseconds", ""] + markdown(["nodes"] + [f"context {context}" for context in contexts], rows)
    for context in contexts:
        if (64, context) in at and context in theirs:
            speed = PAPERS_TOKENS / at[64, context] * 1e3
            text += [f"Were {PAPERS_TOKENS} tokens of each step of 64 nodes accepted, as the paper's are (random heads guess nothing, and a step takes the same time): {speed:.0f} tokens/s behind {context}, {speed * theirs[context] / 1e3:.1f} times transformers.", ""]
    return text


def endurance(lines, *_):
    text = ["## Endurance", ""] if lines else []
    for line in lines:
        device, host = (line[f"{where}_growth_bytes"] / 2**20 for where in ("device", "host"))
        text += [f"{line['steps']} steps: device memory grew by {device:.1f} MiB, the host's by {host:.1f} MiB.", ""]
    return text


def profile(lines, *_):
    text = []
    for part in dict.fromkeys(line["of"] for line in lines):
        of = [line for line in lines if line["of"] == part]
        total, launches = sum(line["us_per_step"] for line in of), sum(line["launches_per_step"] for line in of)
        rows = [(line["kernel"], f"{line['launches_per_step']:.1f}", f"{line['us_per_step']:.1f}", f"{line['share'] * 100:.1f} %", whole(line["gigabytes_per_second"])) for line in of]
        text += [f"## Kernels of a step: {part}", "", f"{launches:.0f} launches, {total:.0f} µs of kernels a step; ncu serialises them, so gaps between kernels are not in it.", ""]
        text += markdown(("kernel", "launches a step", "µs a step", "share", "GB/s"), rows)
    return text


def training(lines, told, results):
    peers = [line for line in told if line.get("check") == "peer"]
    rows = [of_trainer(stage, [line for line in lines if line["stage"] == stage]) for stage in dict.fromkeys(line["stage"] for line in lines)]
    for backbone in dict.fromkeys(line["backbone"] for line in peers):
        of = [line for line in peers if line["backbone"] == backbone]
        rows.append(of_trainer(f"{backbone}, Medusa-1, micro batch of {of[0]['micro_batch_size']}", of))
    header = ("stage", "seconds a step", "tokens/s", "allocator's peak, GiB", "nvidia-smi, GiB")
    text = [f"## Training of the same shape, steps of {TRAINED_TOKENS} tokens", ""] + markdown(header, rows) if rows else []
    return text + beside_peers([line for line in lines if line["stage"] == "medusa1"], peers, results)


def of_trainer(name, lines):
    speed = median_speed(lines)
    most = [gib(most_memory(lines, key)) for key in ("memory_bytes", "device_memory_bytes")]
    return (name, f"{TRAINED_TOKENS / speed:.2f}", f"{speed:.0f}", *most)


def median_speed(lines):
    return statistics.median(line["tokens_per_second"] for line in lines)


def most_memory(lines, key):
    return max(line.get(key, 0) for line in lines)


def beside_peers(ours, peers, results):
    """The speed and the memory of medusa1 as multiples of each peer's, and which peer is missing."""
    text = []
    for backbone in dict.fromkeys(line["backbone"] for line in peers) if ours else ():
        of = [line for line in peers if line["backbone"] == backbone]
        memory = most_memory(ours, "memory_bytes") / most_memory(of, "memory_bytes")
        text += [f"medusa1 beside {backbone}: {median_speed(ours) / median_speed(of):.2f} times its tokens/s, with {memory:.2f} of its memory (allocators' peaks).", ""]
    missing = [f"{part} ({result.get('skipped') or 'failed'})" for part, result in results["parts"].items() if part.startswith("peer") and not result["lines"]]
    text += [f"Not measured: {', '.join(missing)}.", ""] if missing and (ours or peers) else []
    note = "The peers' backbone, heads, gradients and AdamW moments are bfloat16. medusa's heads and gradients are float32, its moments have 8 bits."
    return text + ([note, ""] if peers else [])


def peers_alone(lines, told, results):
    """The peers' lines where medusa's own training did not get as far."""
    return [] if any(line.get("check") == "training" for line in told) else training([], lines, results)


def distill(lines, told, _):
    rows = [("medusa distill" + (", until it was stopped" if line.get("partial") else ""), line.get("batch_size", "-"), *speed_and_memory(line)) for line in lines]
    rows += [("transformers", line["texts"], *speed_and_memory(line)) for line in told if line.get("check") == "transformers_batch"]
    header = ("program", "texts at once", "tokens/s", "allocator's peak, GiB", "nvidia-smi, GiB")
    note = "medusa's cache is allocated at the start, for as many texts as nine tenths of the free memory hold."
    return ["## Distilling, Llama 2 7B's shape", "", note, ""] + markdown(header, rows) if rows else []


def speed_and_memory(line):
    return (f"{line['tokens_per_second']:.0f}", gib(line.get("memory_bytes", 0)), gib(line.get("device_memory_bytes", 0)))


def tiny(lines, *_):
    return [text for line in lines for text in (f"The recipe of the embedded model: loss {line['loss']:.4f} after {line['step']} steps, {line['tokens_per_second']:.0f} tokens/s.", "")]


def bench(lines, *_):
    rows = []
    for line in lines:
        drafted = line.get("medusa", {})
        rows.append((line["engine"], f"{line['plain']['tokens_per_second']:.0f}", f"{drafted.get('tokens_per_second', 0):.0f}", f"{line['acceleration_rate']:.2f}", f"{line['speedup']:.2f}", "yes" if line["identical"] else "NO"))
    header = ("engine", "plain, tokens/s", "Medusa, tokens/s", "tokens a step", "speedup", "identical")
    return ["## The embedded model with heads of 64, trained here", ""] + markdown(header, rows) if rows else []


SECTIONS = {
    "versions": versions,
    "mask": mask,
    "operators": operators,
    "overlap": overlap,
    "kernels": kernels,
    "fused": fused,
    "layers": layers,
    "libtorch": libtorch,
    "loops": loops,
    "hydra_texts": hydra_texts,
    "hydra_steps": hydra_steps,
    "copy": copy,
    "products": products,
    "steps": steps,
    "endurance": endurance,
    "profile": profile,
    "training": training,
    "peer": peers_alone,
    "distill": distill,
    "tiny": tiny,
    "bench": bench,
}
# Lines that other sections read.
WITHOUT_TABLE = ("allocator", "profiled", "transformers", "transformers_batch")
