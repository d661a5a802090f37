//! Products in bfloat16 on AMX tiles: 16 rows of x take little longer than one.
//!
//! A tile is 16 rows of 64 bytes. One instruction multiplies a tile of x (up to 16 rows of 32 inputs) by a tile of weights (32 inputs
//! of 16 outputs) and adds to a tile of sums. Each sum is added up by itself, in the order of the inputs: a row's outputs do not depend on
//! the other rows.
#![expect(unsafe_code, reason = "AMX has no stable intrinsics; lengths are checked before the loops")]

// O outputs, I inputs, N rows of x
use std::arch::asm;
use std::arch::x86_64::__cpuid_count;
use std::cell::Cell;
use std::mem;
use std::ops::Range;
use std::sync::OnceLock;

use super::Number;
use super::arena::{Arena, ArenaLines};
use super::lanes::{Instructions, Lanes, VectorLine, bytes_of, with_lanes};
use super::outputs::{Outputs, share};
use super::rows::WORTH_SHARING;
use super::shared::Shared;
use super::team::Team;

/// Lines of a tile, and outputs of a tile of weights.
const TILE: usize = 16;
/// Inputs of a line of x.
const LINE_INPUTS: usize = 32;
/// Tiles of weights that are multiplied by a tile of x together.
const TOGETHER: usize = 4;
/// Outputs of these.
const GROUP: usize = TOGETHER * TILE;
/// Steps of 32 inputs whose weights, 4 KB each, stay in the first cache beside x and the sums.
const STEPS: usize = 8;
/// Steps between the weights that are multiplied with one block of rows and those that are fetched.
const AHEAD: usize = 12;

/// Sums of a group.
#[derive(Debug, Clone)]
#[repr(C, align(64))]
struct GroupSums([[f32; GROUP]; TILE]);

impl GroupSums {
    const ZERO: Self = Self([[0.0; GROUP]; TILE]);
}

/// Weights `[O, I]` of bfloat16 in tiles.
#[derive(Debug)]
pub(super) struct TileWeights {
    /// `[O / 64, I / 32, 4, 16]`: line p of a tile has inputs 2p and 2p + 1 of 16 outputs; what is left of the last tiles is zero.
    lines: ArenaLines,
    /// Tiles of a row: I / 32.
    depth: usize,
    inputs: usize,
}

impl TileWeights {
    /// Copies weights `[O, I]`, given as bytes.
    pub(super) fn new(weights: &[u8], [outputs, inputs]: [usize; 2], arena: &mut Arena) -> Self {
        let depth = inputs.div_ceil(LINE_INPUTS);
        let row_bytes = inputs * Number::BFloat16.bytes();
        let lines = arena.lines(outputs.div_ceil(GROUP) * depth * GROUP, |lines| {
            let (tiles, _) = lines.as_chunks_mut::<TILE>();
            for (strip, rows) in weights.chunks(TILE * row_bytes).enumerate() {
                let first = strip / TOGETHER * depth * TOGETHER + strip % TOGETHER;
                let tiles = tiles[first..].iter_mut().step_by(TOGETHER).take(depth);
                tiles.enumerate().for_each(|(k, tile)| fill_tile(tile, rows, row_bytes, k));
            }
        });
        Self { lines, depth, inputs }
    }

    /// The first outputs of rows `x_ni` `[N, I]`, to `y`.
    pub(super) fn multiply(&self, outputs: usize, x_ni: &[f32], y: &Outputs<'_>, team: &Team) {
        let lines = outputs.next_multiple_of(GROUP) * self.depth;
        let x = TiledActivations::new(x_ni, self.inputs, self.depth, team);
        // SAFETY: parts write to different outputs, and weights are laid out only where the CPU has AMX.
        let part = |range| unsafe { self.outputs_of(range, &x, y) };
        share([outputs, GROUP], [lines, x.blocks()], team, part);
    }

    /// Some outputs of all rows of x, 64 after 64.
    ///
    /// # Safety
    /// Nobody else reads or writes these outputs, and the CPU has AMX.
    unsafe fn outputs_of(&self, range: Range<usize>, x: &TiledActivations, y: &Outputs<'_>) {
        let _configured = ConfiguredTiles::new(x.block_rows);
        let mut sums = vec![GroupSums::ZERO; x.blocks()];
        for first in range.clone().step_by(GROUP) {
            let outputs = GROUP.min(range.end - first);
            // SAFETY: the caller's promise.
            unsafe { self.group_sums(first, x, &mut sums) };
            for (block, sums) in sums.iter().enumerate() {
                let rows = x.block_rows.min(x.rows - block * x.block_rows);
                for (r, sums) in sums.0[..rows].iter().enumerate() {
                    // SAFETY: the caller's promise.
                    unsafe { y.write(block * x.block_rows + r, first, &sums[..outputs]) };
                }
            }
        }
    }

    /// The outputs of a group. So many steps at once that their weights stay in the first cache for all rows; those of the next steps are fetched
    /// meanwhile.
    ///
    /// # Safety
    /// The CPU has AMX, and its tiles are configured for the blocks of x.
    unsafe fn group_sums(&self, first: usize, x: &TiledActivations, sums: &mut [GroupSums]) {
        let group = &self.lines[first * self.depth..][..GROUP * self.depth];
        let blocks = sums.len();
        let steps = if blocks == 1 { self.depth } else { STEPS };
        for (at, weights) in (0..self.depth).step_by(steps).zip(group.chunks(GROUP * steps)) {
            let x_blocks = x.lines.chunks_exact(self.depth * x.block_rows);
            for (block, (sums, x_lines)) in sums.iter_mut().zip(x_blocks).enumerate() {
                let (now, x_lines) = (weights.len() / GROUP, &x_lines[at * x.block_rows..]);
                let ahead = if blocks == 1 { AHEAD * GROUP } else { weights.len() + block * weights.len() / blocks };
                let later = (weights.as_ptr().wrapping_add(ahead), GROUP.div_ceil(TOGETHER * blocks));
                // SAFETY: the tiles are configured for blocks of these rows, and both slices have so many steps.
                unsafe { add_steps((weights, &x_lines[..now * x.block_rows]), now, later, (at > 0, sums)) };
            }
        }
    }
}

/// Tile `k` of up to 16 rows of weights.
fn fill_tile(tile: &mut [VectorLine; TILE], rows: &[u8], row_bytes: usize, k: usize) {
    let (pairs, _) = bytes_of(tile).as_chunks_mut::<4>();
    let inputs = k * size_of::<VectorLine>()..row_bytes.min((k + 1) * size_of::<VectorLine>());
    for (o, row) in rows.chunks_exact(row_bytes).enumerate() {
        for (p, pair) in row[inputs.clone()].chunks(4).enumerate() {
            pairs[p * TILE + o][..pair.len()].copy_from_slice(pair);
        }
    }
}

thread_local! {
    /// A thread keeps the lines of x for its next product: zeroing new ones takes a twentieth of the time of a prompt.
    static LINES: Cell<Vec<VectorLine>> = const { Cell::new(vec![]) };
}

/// Rows of x as tiles: `[blocks, I / 32, rows of a block]` lines of bfloat16.
struct TiledActivations {
    lines: Vec<VectorLine>,
    /// At most 16. Those that the last block has not are of an earlier product; their outputs are not written.
    block_rows: usize,
    rows: usize,
}

impl TiledActivations {
    fn new(x_ni: &[f32], inputs: usize, depth: usize, team: &Team) -> Self {
        let rows = x_ni.len() / inputs;
        let blocks = rows.div_ceil(TILE);
        let block_rows = rows.div_ceil(blocks);
        let block_lines = depth * block_rows;
        let mut lines = LINES.take();
        lines.resize(lines.len().max(blocks * block_lines), VectorLine::ZERO);
        let out = Shared::new(&mut lines);
        let write = |block: usize| {
            // SAFETY: blocks do not meet.
            let lines = unsafe { out.part(block * block_lines, block_lines) };
            let x_ni = &x_ni[block * block_rows * inputs..];
            write_block(&x_ni[..x_ni.len().min(block_rows * inputs)], inputs, lines, block_rows);
        };
        match x_ni.len() >= WORTH_SHARING {
            true => team.run(blocks, write),
            false => (0..blocks).for_each(write),
        }
        Self { lines, block_rows, rows }
    }

    fn blocks(&self) -> usize {
        self.rows.div_ceil(self.block_rows)
    }
}

impl Drop for TiledActivations {
    fn drop(&mut self) {
        LINES.set(mem::take(&mut self.lines));
    }
}

/// Rows of x, to `[I / 32, rows of a block]` lines.
fn write_block(x_ni: &[f32], inputs: usize, lines: &mut [VectorLine], block_rows: usize) {
    for (row, x_i) in x_ni.chunks_exact(inputs).enumerate() {
        for (k, x) in x_i.chunks(LINE_INPUTS).enumerate() {
            let line = &mut lines[row + k * block_rows];
            match x.first_chunk() {
                // One line: AMX is used with AVX-512 only.
                Some(x) => with_lanes!(lanes => lanes.write_bfloat16_x(x, std::slice::from_mut(line))),
                None => {
                    *line = VectorLine::ZERO;
                    Number::BFloat16.write(x, bytes_of(std::slice::from_mut(line)));
                }
            }
        }
    }
}

/// The products of some steps of a block of rows and a group of outputs, added to `sums` if it continues them, else written there. After each product of
/// two tiles, `fetched` lines of weights are fetched, from `later` on.
///
/// # Safety
/// [`ConfiguredTiles`] for the block's rows are there; `group` has `steps` times 4 tiles, `x_lines` `steps` times the block's rows.
unsafe fn add_steps(
    (group, x_lines): (&[VectorLine], &[VectorLine]),
    steps: usize,
    (later, fetched): (*const VectorLine, usize),
    (continues, sums): (bool, &mut GroupSums),
) {
    static ZERO: GroupSums = GroupSums::ZERO;
    let from: *const GroupSums = if continues { sums } else { &raw const ZERO };
    /// Fetches so many lines.
    macro_rules! fetch {
        () => {
            "mov {left}, {fetched}\n3:\nprefetcht1 [{later}]\nadd {later}, 64\ndec {left}\njnz 3b"
        };
    }
    // SAFETY: all reads and writes are within the slices, by the caller's promise.
    unsafe {
        asm!(
            "tileloadd tmm0, [{from} + {row}]",
            "tileloadd tmm1, [{from} + {row} + 64]",
            "tileloadd tmm2, [{from} + {row} + 128]",
            "tileloadd tmm3, [{from} + {row} + 192]",
            "2:",
            "tileloadd tmm4, [{x} + {line}]",
            "tileloadd tmm5, [{w} + {line}]",
            "tdpbf16ps tmm0, tmm4, tmm5",
            fetch!(),
            "tileloadd tmm6, [{w} + {line} + 1024]",
            "tdpbf16ps tmm1, tmm4, tmm6",
            fetch!(),
            "tileloadd tmm5, [{w} + {line} + 2048]",
            "tdpbf16ps tmm2, tmm4, tmm5",
            fetch!(),
            "tileloadd tmm6, [{w} + {line} + 3072]",
            "tdpbf16ps tmm3, tmm4, tmm6",
            fetch!(),
            "add {x}, {x_step}",
            "add {w}, 4096",
            "dec {steps}",
            "jnz 2b",
            "tilestored [{sums} + {row}], tmm0",
            "tilestored [{sums} + {row} + 64], tmm1",
            "tilestored [{sums} + {row} + 128], tmm2",
            "tilestored [{sums} + {row} + 192], tmm3",
            x = inout(reg) x_lines.as_ptr() => _,
            w = inout(reg) group.as_ptr() => _,
            steps = inout(reg) steps => _,
            later = inout(reg) later => _,
            left = out(reg) _,
            fetched = in(reg) fetched,
            x_step = in(reg) size_of_val(x_lines) / steps,
            line = in(reg) size_of::<VectorLine>(),
            from = in(reg) from,
            sums = in(reg) sums.0.as_mut_ptr(),
            row = in(reg) GROUP * size_of::<f32>(),
            out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _, out("tmm4") _, out("tmm5") _, out("tmm6") _,
            options(nostack),
        );
    }
}

/// This thread's tiles, with shapes for one product. Given back when dropped: a thread with tiles in use is slower to switch.
pub(super) struct ConfiguredTiles;

/// What `ldtilecfg` reads.
#[repr(C, align(64))]
struct TileShapes {
    palette: u8,
    start_row: u8,
    reserved: [u8; 14],
    line_bytes: [u16; 16],
    rows: [u8; 16],
}

impl ConfiguredTiles {
    /// Tiles for `rows` rows of x: the sums (0 to 3), x (4), weights (5 to 7).
    pub(super) fn new(rows: usize) -> Self {
        let mut shapes = TileShapes { palette: 1, start_row: 0, reserved: [0; 14], line_bytes: [0; 16], rows: [0; 16] };
        for tile in 0..8 {
            shapes.line_bytes[tile] = size_of::<VectorLine>() as u16;
            shapes.rows[tile] = if tile < 5 { rows as u8 } else { TILE as u8 };
        }
        // SAFETY: the shapes are ones that AMX has: 1 to 16 rows of 64 bytes.
        unsafe { asm!("ldtilecfg [{}]", in(reg) &raw const shapes, options(nostack, readonly)) };
        Self
    }
}

impl Drop for ConfiguredTiles {
    fn drop(&mut self) {
        // SAFETY: the sums were stored.
        unsafe { asm!("tilerelease", options(nostack, nomem)) };
    }
}

/// Whether this CPU has AMX with bfloat16, and the system lets this process use it.
pub fn available() -> bool {
    static AVAILABLE: OnceLock<bool> = OnceLock::new();
    *AVAILABLE.get_or_init(|| {
        matches!(Instructions::detected(), Some(Instructions::Avx512(_))) && has_amx_bf16() && permitted()
    })
}

fn has_amx_bf16() -> bool {
    // SAFETY: a CPU with AVX-512 has this leaf.
    #[allow(unused_unsafe, reason = "the call is safe in newer versions of Rust than the oldest that builds this")]
    let features = unsafe { __cpuid_count(7, 0) };
    features.edx & (1 << 22) != 0
}

/// Linux gives a process the tiles when it asks for them.
#[cfg(target_os = "linux")]
fn permitted() -> bool {
    const REQUEST_PERMISSION: libc::c_ulong = 0x1023;
    const TILE_DATA: libc::c_ulong = 18;
    // SAFETY: the call reads two numbers.
    unsafe { libc::syscall(libc::SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0 }
}

#[cfg(not(target_os = "linux"))]
fn permitted() -> bool {
    false
}
