//! AdamW's update, the norm of the gradients and the check that parameters are finite: one launch each for all parameters. Oracles are in
//! [`crate::torch::optim::adamw`].

use tch::{Device, Kind, Tensor};

use super::{TensorKernels, kernels};
use crate::nvidia::kernels::{CHUNK, Program};
use crate::nvidia::launch::{Argument, Launch, address, float, floats, size, tensor};
use crate::torch::optim::OptimizerName;
use crate::torch::optim::adamw::{self, AdamW, Moment, Parameter, Update};
use crate::torch::optim::blockwise::DynamicMap;
use crate::torch::rehearsal;
use crate::torch::upload;

/// Threads of a block.
const THREADS: i64 = 256;

/// What [`norm`] launches, with the copy of its table. Like the other lists of names here, it is counted by tests/launches.rs, and
/// tests/fused.rs compares it with the launches.
pub const OF_NORM: [&str; 3] = ["upload", "squares", "norm_of_squares"];
/// What [`finite`] launches, with the copies to and from the device.
pub const OF_FINITE: [&str; 4] = ["upload", "full", "first_not_finite", "read"];

/// Launches, and the tensors that exist only for them.
#[derive(Debug)]
pub struct TableWork {
    pub launches: Vec<Launch>,
    /// The tables that the launches read, and what they write.
    pub tensors: Vec<Tensor>,
}

/// Updates all parameters as [`AdamW::step`] does.
pub fn step(optimizer: &mut AdamW, parameters: &mut [&mut Parameter], rate: f64, scale: f64) {
    optimizer.count_update();
    let devices = parameters.iter().map(|parameter| parameter.value.device());
    for places in places_by(devices) {
        let first = &*parameters[places[0]];
        match kernels(first.value.device(), first.value.kind()) {
            Some(kernels) => {
                let on_device: Vec<(usize, &Parameter)> = places.iter().map(|&at| (at, &*parameters[at])).collect();
                run(kernels, &launches(optimizer, &on_device, rate, scale));
            }
            None => rehearsal::in_place_of(update_kernels(optimizer), || {
                let all = parameters.iter_mut().map(|parameter| &mut **parameter).enumerate();
                optimizer.apply(all.filter(|(at, _)| places.contains(at)), rate, scale);
            }),
        }
    }
}

/// The places of equal items, those of the first item first.
fn places_by<K: PartialEq>(items: impl Iterator<Item = K>) -> Vec<Vec<usize>> {
    let mut groups: Vec<(K, Vec<usize>)> = vec![];
    for (at, item) in items.enumerate() {
        match groups.iter_mut().find(|(other, _)| *other == item) {
            Some((_, places)) => places.push(at),
            None => groups.push((item, vec![at])),
        }
    }
    groups.into_iter().map(|(_, places)| places).collect()
}

/// The parameters of each device, with their places; those of the first parameter's device first.
fn by_device<'p>(parameters: &[&'p Parameter]) -> Vec<(Vec<usize>, Vec<&'p Parameter>)> {
    let groups = places_by(parameters.iter().map(|parameter| parameter.value.device()));
    let with_parameters = |places: Vec<usize>| {
        let on_device = places.iter().map(|&at| parameters[at]).collect();
        (places, on_device)
    };
    groups.into_iter().map(with_parameters).collect()
}

/// What [`update`] launches, with the copies of its tables.
pub fn update_kernels(optimizer: &AdamW) -> &'static [&'static str] {
    match optimizer.name() {
        OptimizerName::AdamW => &["upload", "adamw"],
        OptimizerName::AdamW8bit => &["upload", "adamw", "upload", "adamw_8bit"],
    }
}

/// The Euclidean norm over all gradients, as [`adamw::gradient_norm`], `[1]` float64 on the device of the first.
pub fn gradient_norm(parameters: &[&Parameter]) -> Tensor {
    joined_norm(by_device(parameters).iter().map(|(_, own)| norm_on_device(own)).collect())
}

/// The norm of all from the norms `[1]` of some, on the device of the first.
fn joined_norm(norms: Vec<Tensor>) -> Tensor {
    match &norms[..] {
        [] => Tensor::from_slice(&[0_f64]),
        [norm] => norm.shallow_clone(),
        [first, ..] => {
            let here: Vec<Tensor> = norms.iter().map(|norm| norm.to_device(first.device())).collect();
            Tensor::cat(&here, 0).norm().view([1])
        }
    }
}

/// Of parameters on one device.
fn norm_on_device(parameters: &[&Parameter]) -> Tensor {
    let Some(kernels) = on_device(parameters.first().copied()) else {
        let norm = rehearsal::in_place_of(&OF_NORM, || adamw::gradient_norm(parameters.iter().copied()));
        let device = parameters.first().map_or(Device::Cpu, |parameter| parameter.gradient.device());
        return Tensor::from_slice(&[norm]).to_device(device); // losses on the device are read with it
    };
    let (work, norm) = norm(parameters);
    run(kernels, &work);
    norm
}

/// The first parameter with a value that is not finite, as [`adamw::first_not_finite`].
pub fn first_not_finite(parameters: &[&Parameter]) -> Option<usize> {
    let on_each = by_device(parameters).into_iter();
    on_each.filter_map(|(places, own)| Some(places[not_finite_on_device(&own)?])).min()
}

/// Of parameters on one device.
fn not_finite_on_device(parameters: &[&Parameter]) -> Option<usize> {
    let Some(kernels) = on_device(parameters.first().copied()) else {
        return rehearsal::in_place_of(&OF_FINITE, || adamw::first_not_finite(parameters));
    };
    let (work, first) = finite(parameters);
    run(kernels, &work);
    usize::try_from(first.int64_value(&[0])).ok().filter(|&first| first < parameters.len())
}

/// The kernels of the device that the parameters are on.
fn on_device(first: Option<&Parameter>) -> Option<&'static TensorKernels> {
    first.and_then(|parameter| kernels(parameter.value.device(), parameter.value.kind()))
}

fn run(kernels: &TensorKernels, work: &TableWork) {
    work.launches.iter().for_each(|launch| kernels.launch(launch));
}

/// The launches of an update, which is counted: one for parameters with float32 moments, and one for those with 8-bit moments.
pub fn update(optimizer: &mut AdamW, parameters: &[&Parameter], rate: f64, scale: f64) -> TableWork {
    optimizer.count_update();
    launches(optimizer, &parameters.iter().copied().enumerate().collect::<Vec<_>>(), rate, scale)
}

/// Those of the update that was counted last, for parameters on one device with their places among the optimizer's.
fn launches(optimizer: &AdamW, parameters: &[(usize, &Parameter)], rate: f64, scale: f64) -> TableWork {
    let mut work = TableWork { launches: vec![], tensors: vec![] };
    let (mut wide, mut narrow, mut maps) = (vec![], vec![], None);
    for &(at, parameter) in parameters {
        let (moments, update) = (&optimizer.moments()[at], optimizer.update_of(parameter, rate, scale));
        let entry = TableRow::of(parameter, Some(&update));
        match [&moments.first, &moments.second] {
            [Moment::EightBit(first), Moment::EightBit(second)] => {
                maps.get_or_insert([&first.map, &second.map]);
                let moments = [&first.codes, &second.codes].map(|codes| address(codes, Kind::Uint8));
                let absmax = [&first.absmax, &second.absmax].map(|absmax| address(absmax, Kind::Float));
                narrow.push(TableRow { moments, absmax, ..entry });
            }
            [Moment::Wide(first), Moment::Wide(second)] => {
                let moments = [first, second].map(|moment| address(moment, Kind::Float));
                wide.push(TableRow { moments, ..entry });
            }
            _ => unreachable!("both moments of a parameter have as many bits"),
        }
    }
    let Some((_, first)) = parameters.first() else { return work };
    let (device, constants) = (first.value.device(), constants(&optimizer.update_of(first, rate, scale)));
    work.add("adamw", &Table::of(wide, device), &constants);
    if let Some(maps) = maps {
        let arguments = [maps_of(maps), constants.to_vec()].concat();
        work.add("adamw_8bit", &Table::of(narrow, device), &arguments);
    }
    work
}

/// The launches that write the norm of all gradients to the returned float64 tensor `[1]`.
pub fn norm(parameters: &[&Parameter]) -> (TableWork, Tensor) {
    let (table, device) = Table::from_parameters(parameters);
    let partial_c = Tensor::empty([table.chunks], (Kind::Double, device)); // each block writes its chunk's
    let norm = Tensor::empty([1], (Kind::Double, device));
    let mut work = TableWork { launches: vec![], tensors: vec![] };
    work.add("squares", &table, &[tensor(&partial_c, Kind::Double)]);
    let arguments = vec![tensor(&partial_c, Kind::Double), size(table.chunks), tensor(&norm, Kind::Double)];
    work.launches.push(Launch::new(Program::Optim, "norm_of_squares", [1, 1, 1], THREADS, arguments));
    work.tensors.push(partial_c);
    (work, norm)
}

/// The launch that writes the number of the first parameter that is not finite to the returned int32 tensor `[1]`, or leaves a larger one there.
pub fn finite(parameters: &[&Parameter]) -> (TableWork, Tensor) {
    let (table, device) = Table::from_parameters(parameters);
    let first = Tensor::full([1], i64::from(i32::MAX), (Kind::Int, device));
    let mut work = TableWork { launches: vec![], tensors: vec![] };
    work.add("first_not_finite", &table, &[tensor(&first, Kind::Int)]);
    (work, first)
}

impl TableWork {
    /// A launch over all chunks of a table, if there are any; `arguments` follow the table.
    fn add(&mut self, name: &'static str, table: &Table, arguments: &[Argument]) {
        if table.chunks > 0 {
            let rows_and_count = [tensor(&table.rows, Kind::Int64), size(table.entries)];
            let arguments = [&rows_and_count[..], arguments].concat();
            self.launches.push(Launch::new(Program::Optim, name, [table.chunks, 1, 1], THREADS, arguments));
            self.tensors.push(table.rows.shallow_clone());
        }
    }
}

/// What all parameters of an update share.
fn constants(update: &Update) -> [Argument; 6] {
    [update.scale, 1.0 - update.beta1, update.beta2, 1.0 - update.beta2, update.second_correction, update.eps]
        .map(float)
}

/// Codes and nearest codes of the first and of the second moments.
fn maps_of(maps: [&DynamicMap; 2]) -> Vec<Argument> {
    maps.into_iter().flat_map(|map| [floats(&map.codes), tensor(&map.nearest, Kind::Uint8)]).collect()
}

/// Where a parameter's numbers are, and its own constants.
#[derive(Debug, Clone, Copy, Default)]
struct TableRow {
    value: u64,
    gradient: u64,
    moments: [u64; 2],
    absmax: [u64; 2],
    count: u64,
    decay: f32,
    step_size: f32,
}

impl TableRow {
    #[expect(clippy::cast_possible_truncation, reason = "kernels compute in float32")]
    fn of(parameter: &Parameter, update: Option<&Update>) -> Self {
        Self {
            value: address(&parameter.value, Kind::Float),
            gradient: address(&parameter.gradient, Kind::Float),
            count: parameter.value.numel() as u64,
            decay: update.map_or(1.0, |update| update.decay as f32),
            step_size: update.map_or(0.0, |update| update.step_size as f32),
            ..Self::default()
        }
    }
}

/// The table that a launch reads: `struct Entry` of optim.cu for each parameter. An empty one has no chunk: no block finds it.
#[derive(Debug)]
struct Table {
    /// `[E, 9]`, int64.
    rows: Tensor,
    entries: i64,
    chunks: i64,
}

impl Table {
    fn of(entries: Vec<TableRow>, device: Device) -> Self {
        let (mut chunks, count) = (0, entries.len() as i64);
        let mut rows = vec![];
        for entry in entries {
            rows.extend(entry.row(chunks));
            chunks += entry.count.div_ceil(CHUNK.unsigned_abs());
        }
        Self { rows: upload(&rows, device), entries: count, chunks: chunks.cast_signed() }
    }

    /// Without moments.
    fn from_parameters(parameters: &[&Parameter]) -> (Self, Device) {
        let device = parameters.first().map_or(Device::Cpu, |parameter| parameter.value.device());
        (Self::of(parameters.iter().map(|parameter| TableRow::of(parameter, None)).collect(), device), device)
    }
}

impl TableRow {
    /// As in optim.cu; chunks before this entry's are counted by `first_chunk`.
    fn row(self, first_chunk: u64) -> [i64; 9] {
        let [first, second] = self.moments;
        let [first_absmax, second_absmax] = self.absmax;
        let floats = u64::from(self.decay.to_bits()) | u64::from(self.step_size.to_bits()) << 32;
        [self.value, self.gradient, first, second, first_absmax, second_absmax, self.count, first_chunk, floats]
            .map(u64::cast_signed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parameters_are_grouped_in_their_order() {
        assert_eq!(places_by("abacb".chars()), [vec![0, 2], vec![1, 4], vec![3]]);
        assert!(places_by("".chars()).is_empty());
    }

    #[test]
    fn the_norm_of_all_is_that_of_the_devices_norms() {
        let norms = |norms: &[f64]| norms.iter().map(|norm| Tensor::from_slice(&[*norm])).collect();
        let joined = |values: &[f64]| Vec::<f64>::try_from(joined_norm(norms(values))).expect("one norm");
        assert_eq!((joined(&[]), joined(&[0.1]), joined(&[2.0, 3.0, 6.0])), (vec![0.0], vec![0.1], vec![7.0]));
        assert!(joined(&[1.0, f64::NAN])[0].is_nan(), "a step with it is refused");
    }
}
