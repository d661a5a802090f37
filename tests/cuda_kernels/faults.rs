//! The emulator finds faults of kernels, and rounds as libtorch does.

use super::*;

/// Runs a kernel in the emulator in both orders of threads: `OUT[thread]`, or the error.
fn of_kernel(body: &str, threads: u32, shared_bytes: u32) -> [Result<Vec<i64>, String>; 2] {
    of_whole_kernel(&format!("begin(); {body}"), threads, shared_bytes)
}

/// Like [`of_kernel`], of a kernel that waits for the kernels before it by itself.
fn of_whole_kernel(body: &str, threads: u32, shared_bytes: u32) -> [Result<Vec<i64>, String>; 2] {
    let memory = Memory::default();
    let source = format!(
        "#define ELEMENT_BF16
#define HEAD_SIZE 64
{PRELUDE}
KERNEL(64) probe(int* out) {{ {body} }}
"
    );
    [Order::Forwards, Order::Backwards].map(|order| {
        let out = memory.poisoned(&[i64::from(threads)], Kind::Int);
        let launch = Launch {
            kernel: Kernel { program: Program::Rows, name: "probe" },
            grid: [1, 1, 1],
            threads,
            shared_bytes,
            arguments: vec![Argument::Pointer(out.data_ptr() as u64)],
        };
        emulator::run(&source, &["probe"], &launch, order, &memory.hidden())?;
        Ok(Vec::try_from(out.to_kind(Kind::Int64)).expect("one axis"))
    })
}

#[test]
fn the_emulator_finds_what_a_gpu_would_not_forgive() {
    let faults = [
        ("int i = threadIdx.x; out[i + 1] = i;", "memory that is not its own"),
        ("if (threadIdx.x < 9) __syncwarp(); __syncthreads();", "waits for ever at __sync"),
        ("if (threadIdx.x < 32) __syncthreads();", "waits for ever at __syncthreads"),
        (
            "if (threadIdx.x % 2) __shfl_xor_sync(ALL_LANES, 1, 1); else __ballot_sync(ALL_LANES, 1);",
            "others of its warp or block are at",
        ),
        ("out[threadIdx.x] = __shfl_xor_sync(1u, 1, 1);", "a mask that is not the whole warp"),
        ("store16((char*)out + 4, make_uint4(1, 2, 3, 4));", "no multiple of 16"),
        ("LAUNCHED_SHARED(room); copy16_async(room, out, true);", "a copy that it never waited for"),
        ("LAUNCHED_SHARED(room); copy16_async(room + 64, out, true);", "not shared memory"),
        ("LAUNCHED_SHARED(room); room[64] = make_uint4(0, 0, 0, 0);", "memory that is not its own"),
    ];
    for (body, words) in faults {
        for outcome in of_kernel(body, 64, 1024) {
            assert!(outcome.as_ref().is_err_and(|error| error.contains(words)), "{body}: {outcome:?}");
        }
    }
    let early = [
        ("out[threadIdx.x] = 1; begin();", "before it has waited"),
        ("LAUNCHED_SHARED(room); copy16_async(room, out, true); begin(); wait_copies<0>();", "before it has waited"),
        ("if (threadIdx.x > 3) return; begin();", "ends without waiting for the kernels before it"),
    ];
    for (body, words) in early {
        for outcome in of_whole_kernel(body, 64, 1024) {
            assert!(outcome.as_ref().is_err_and(|error| error.contains(words)), "{body}: {outcome:?}");
        }
    }
    // Faults without an error show as a difference between the orders, or as poison.
    let racing = of_kernel(
        "SHARED int last; last = threadIdx.x; out[threadIdx.x] = last; __syncthreads(); out[threadIdx.x] = last;",
        64,
        0,
    );
    assert_ne!(racing[0], racing[1]);
    let before = of_kernel("SHARED int x[64]; out[threadIdx.x] = x[63 - threadIdx.x]; x[threadIdx.x] = 1;", 64, 0);
    assert!(before.iter().flatten().all(|out| out.contains(&-1)), "{before:?}");
    let unfenced = "SHARED int x[64]; x[threadIdx.x] = 1; begin(); out[threadIdx.x] = x[63 - threadIdx.x];";
    let unfenced = of_whole_kernel(unfenced, 64, 0); // to wait for the kernels before is no barrier
    assert!(unfenced.iter().flatten().all(|out| out.contains(&-1)), "{unfenced:?}");
    let copied = "LAUNCHED_SHARED(room); SHARED uint4 from[64]; int i = threadIdx.x; from[i] = make_uint4(7, 7, 7, 7); \
                  copy16_async(room + i, from + i, true); end_copies(); int early = room[i].x; wait_copies<0>(); ";
    for (read, expected) in [("early", -1), ("room[i].x", 7)] {
        let outcome = of_kernel(&format!("{copied} out[i] = {read};"), 64, 1024);
        assert!(outcome.iter().all(|out| out.as_ref().is_ok_and(|out| *out == [expected; 64])), "{outcome:?}");
    }
    let right =
        "SHARED int x[64]; x[threadIdx.x] = threadIdx.x; __syncthreads(); out[threadIdx.x] = x[63 - threadIdx.x];";
    assert_eq!(
        of_kernel(right, 64, 0).map(Result::unwrap),
        [(0..64).rev().collect::<Vec<i64>>(), (0..64).rev().collect()]
    );
}

#[test]
fn the_emulator_rounds_as_libtorch_does() {
    let all = Tensor::arange(65536, (Kind::Int, Device::Cpu)).to_kind(Kind::Int16).view([1, 65536]);
    for (number, &kind) in KINDS.iter().enumerate() {
        let case = Case::new(number, 0, "every number and another one".to_owned());
        assert_eq!(case.kind, kind);
        let x_nh = all.view_dtype(kind);
        let finite = |x: &Tensor| x.to_kind(Kind::Float).nan_to_num(0.0, 1e30, -1e30);
        let x_nh = finite(&x_nh).to_kind(kind); // without NaN; numbers too large for the dtype become infinite again
        for seed in 0..4 {
            let delta_nh = case.memory.tensor(&x_nh.index_select(1, &Generator::seeded(seed).permutation(65536)));
            let got = case.memory.tensor(&x_nh);
            add_in_place(&case, &got, &delta_nh);
            let expected = (x_nh.to_kind(Kind::Float) + delta_nh.to_kind(Kind::Float)).to_kind(kind);
            case.assert_equal(&finite(&got), &finite(&expected)); // inf - inf is NaN in both
        }
    }
}

/// x += delta by a kernel of the test.
fn add_in_place(case: &Case, x: &Tensor, delta: &Tensor) {
    let element = if case.kind == Kind::Half { "ELEMENT_F16" } else { "ELEMENT_BF16" };
    let body =
        "begin(); int i = blockIdx.x * 64 + threadIdx.x; x[i] = to_element(to_float(x[i]) + to_float(delta[i]));";
    let source = format!(
        "#define {element}\n#define HEAD_SIZE 64\n{PRELUDE}\nKERNEL(64) add(element* x, const element* delta) {{ {body} }}\n"
    );
    let launch = Launch {
        kernel: Kernel { program: Program::Rows, name: "add" },
        grid: [x.numel() as u32 / 64, 1, 1],
        threads: 64,
        shared_bytes: 0,
        arguments: [x, delta].map(|tensor| Argument::Pointer(tensor.data_ptr() as u64)).to_vec(),
    };
    emulator::run(&source, &["add"], &launch, case.order, &[]).unwrap_or_else(|error| panic!("{error}"));
}
