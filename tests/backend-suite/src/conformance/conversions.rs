//! Conversion between storage types, and its report of finite elements that become infinite.

use bytes::Bytes;
use half::{bf16, f16};
use kyklos::Dtype;
use kyklos::backend::{Backend, Elements};
use kyklos_oracle::inputs::{TensorId, normal};

use super::states::read;

/// Converts every kind of number to 16 bits and back, from the middle of a buffer. A read may flush
/// numbers that are subnormal in f16 to zero.
pub(super) async fn both_ways<B: Backend>(backend: &B, who: &str) {
    let mut numbers: Vec<f32> = vec![
        0.0,
        -0.0,
        1.0,
        -1.000_976_6,
        65504.0,
        65519.99,
        65520.0,
        -1e38,
        f32::INFINITY,
        f32::NEG_INFINITY,
        6.1e-5,
        1.0 + 1.0 / 2048.0,
        1.0 + 3.0 / 2048.0,
        1.0 + 1.0 / 256.0,
        1.0 + 3.0 / 256.0,
        3.389e38,
    ];
    numbers.extend((0..4096 * 8 - 16).map(|i| normal(9, TensorId::V, i) * 1000.0_f32.powi(i as i32 % 5 - 2)));
    let first = 16;
    let source = backend.upload("numbers", Bytes::from(bytemuck::cast_slice(&numbers).to_vec())).unwrap();
    let wanted = &numbers[first..];
    for dtype in [Dtype::F16, Dtype::Bf16] {
        let mut short = backend.upload("short", Bytes::from(vec![0xa5; numbers.len() * 2])).unwrap();
        let shape = |elements| [1, elements / 8, 1, 8];
        let stored = |buffer, first, dtype| Elements::Stored { buffer, first, dtype };
        let into = Elements::Stored { buffer: &mut short, first: 0, dtype };
        let mut word = backend.upload("overflow", Bytes::from(vec![0; 16])).unwrap();
        backend
            .convert(stored(&source, first, Dtype::F32), into, shape(wanted.len()), Some(&mut word))
            .unwrap();
        let reported = read(backend, &mut word, 0..16).await;
        let beyond = [u8::from(dtype == Dtype::F16), 0, 0, 0];
        assert_eq!(reported[..4], beyond, "{who}: numbers beyond the range of {dtype}");
        assert_eq!(reported[4..], [0; 12], "{who}: words behind the report");
        let bytes = backend.download(&mut short, 0..numbers.len() * 2).await.unwrap();
        let bits: Vec<u16> = bytemuck::pod_collect_to_vec(&bytes[..]);
        let rounded = |x: &f32| match dtype {
            Dtype::F16 => f16::from_f32(*x).to_bits(),
            _ => bf16::from_f32(*x).to_bits(),
        };
        for (place, (x, bits)) in wanted.iter().zip(&bits).enumerate() {
            assert_eq!(*bits, rounded(x), "{who}: {x} in {dtype} at {place}");
        }
        assert!(bits[wanted.len()..].iter().all(|bits| *bits == 0xa5a5), "{who}: more than was asked");

        let mut long = backend.upload("long", Bytes::from(vec![0xa5; wanted.len() * 4])).unwrap();
        let into = Elements::Stored { buffer: &mut long, first: 0, dtype: Dtype::F32 };
        backend.convert(stored(&short, 8, dtype), into, shape(wanted.len() - 8), None).unwrap();
        let bytes = backend.download(&mut long, 0..(wanted.len() - 8) * 4).await.unwrap();
        let back: Vec<f32> = bytemuck::pod_collect_to_vec(&bytes[..]);
        for (x, bits) in back.iter().zip(&bits[8..]) {
            let exact = match dtype {
                Dtype::F16 => f16::from_bits(*bits).to_f32(),
                _ => bf16::from_bits(*bits).to_f32(),
            };
            let flushed = dtype == Dtype::F16 && exact.abs() < 6.2e-5 && *x == 0.0;
            assert!(x.to_bits() == exact.to_bits() || flushed, "{who}: {x} for {exact} of {dtype}");
        }
    }
}

/// One finite number in many is reported where it is the first beyond the range of f16, anywhere;
/// what was infinite or NaN before is not, and a report stays.
pub(super) async fn reports<B: Backend>(backend: &B, who: &str) {
    let all = 3 * 1024 + 8;
    let mut word = backend.upload("overflow", Bytes::from(vec![0; 16])).unwrap();
    let fine = [65_519.996, -65_519.996, f32::INFINITY, f32::NEG_INFINITY, f32::NAN, 1e-45, -0.0, 65_504.0];
    let trials = [(None, 0.0), (Some(5), f32::INFINITY), (Some(8), f32::NAN), (Some(0), 65_520.0)];
    let trials = trials.into_iter().chain([(Some(all - 1), -65_520.0), (Some(1027), f32::MAX), (None, 0.0)]);
    for (place, x) in trials {
        let mut numbers: Vec<f32> = fine.into_iter().cycle().take(all).collect();
        place.into_iter().for_each(|place: usize| numbers[place] = x);
        let beyond = place.is_some() && x.is_finite();
        if beyond {
            backend.write(&mut word, 0, &[0; 16]).unwrap();
        }
        let before = read(backend, &mut word, 0..4).await;
        let source = backend.upload("numbers", Bytes::from(bytemuck::cast_slice(&numbers).to_vec())).unwrap();
        let mut short = backend.alloc("short", all * 2).unwrap();
        let from = Elements::Stored { buffer: &source, first: 0, dtype: Dtype::F32 };
        let into = Elements::Stored { buffer: &mut short, first: 0, dtype: Dtype::F16 };
        backend.convert(from, into, [1, all / 8, 1, 8], Some(&mut word)).unwrap();
        let after = read(backend, &mut word, 0..4).await;
        let wanted = if beyond { vec![1, 0, 0, 0] } else { before.to_vec() };
        assert_eq!(after[..], wanted[..], "{who}: {x} at {place:?}");
    }
}
