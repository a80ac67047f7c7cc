//! What the backend refuses: drivers and devices that have no kernels, and wrong calls.

use bytes::Bytes;
use kyklos::backend::{Backend, Elements, Extent, Layout, Scales};
use kyklos::{Dtype, Error, Result};
use kyklos_cuda::{CudaBackend, availability, devices};
use pollster::block_on;

use crate::faults::is_right;
use crate::scenario::Scenario;

pub(crate) fn scenarios() -> Vec<Scenario> {
    let unavailable = |name: &str, fake: &str, words: &'static [&'static str]| {
        Scenario::new(&format!("reports why it cannot run: {name}"), fake, move || {
            let why = availability().unwrap_err().to_string();
            let error = CudaBackend::new(0).unwrap_err();
            assert!(words.iter().all(|word| why.contains(word)), "{why}");
            assert_eq!((error.to_string(), error.is_request()), (why, true));
        })
    };
    vec![
        unavailable("no device", "devices=0", &["cuInit", "CUDA_ERROR_NO_DEVICE (100)"]),
        unavailable("an old driver", "version=11080", &["11.8", "12.0", "525"]),
        unavailable(
            "kernels of a newer CUDA",
            "version=12040",
            &["12.4", "need CUDA 13.0", "driver 580", "NVRTC of CUDA 12"],
        ),
        unavailable(
            "PTX of a newer CUDA",
            "version=12040,nvrtc=12060,capability=121",
            &["12.4", "NVRTC 12.6 need CUDA 12.6", "or earlier"],
        ),
        Scenario::new("takes kernels by an NVRTC of the driver's CUDA", "version=12040,nvrtc=12060", || {
            availability().unwrap();
            let backend = CudaBackend::new(0).unwrap();
            assert!(backend.info().kernel.contains("sm_90a by NVRTC 12.6"), "{}", backend.info().kernel);
            is_right(&backend);
        }),
        unavailable("an old device", "capability=75", &["Fake GPU 0", "7.5", "8.0", "wgpu"]),
        Scenario::new("lists devices, and refuses an index that is too large", "devices=2", || {
            let all = devices().unwrap();
            assert_eq!(
                all.iter().map(|device| device.info.name.as_str()).collect::<Vec<_>>(),
                ["Fake GPU 0", "Fake GPU 1"]
            );
            assert!(all.iter().all(|device| device.refused.is_none() && device.capability == (9, 0)));
            let error = CudaBackend::new(2).unwrap_err().to_string();
            assert!(error.contains("cuda:2") && error.contains("has 2"), "{error}");
        }),
        Scenario::new(
            "refuses conversions without a kernel, and accesses behind the end of a buffer",
            "",
            || {
                let backend = CudaBackend::new(0).unwrap();
                let mut buffer = backend.upload("data", Bytes::from_static(&[0; 64])).unwrap();
                let mut short = backend.alloc("short", 32).unwrap();
                let request =
                    |result: Result<()>| assert!(matches!(result, Err(Error::Request { .. })), "{result:?}");
                // Pairs of types without a kernel, a first element that is not a multiple of 8, and more
                // elements than either buffer has.
                for (first, dtype, tokens) in [
                    (0, Dtype::Bf16, 1),
                    (0, Dtype::F16, 1),
                    (4, Dtype::F32, 1),
                    (8, Dtype::F32, 2),
                    (0, Dtype::F32, 3),
                ] {
                    request(backend.convert(
                        Elements::Stored { buffer: &buffer, first, dtype },
                        Elements::Stored { buffer: &mut short, first: 0, dtype: Dtype::F16 },
                        [1, tokens, 1, 8],
                        None,
                    ));
                }
                let mut scales = backend.alloc("scales", 8).unwrap();
                let (first, dtype) = (0, Dtype::F16);
                for (of, shape) in [
                    (Scales::Rows, [1, 1, 1, 264]),
                    (Scales::Rows, [1, 3, 1, 8]),
                    (Scales::Channels, [1, 1, 1, 8]),
                    (Scales::Rows, [1, 1, 1, 40]),
                ] {
                    request(backend.convert(
                        Elements::Stored { buffer: &buffer, first, dtype },
                        Elements::Coded { codes: &mut short, scales: &mut scales, of },
                        shape,
                        None,
                    ));
                }
                request(backend.write(&mut buffer, 62, &[0; 4]));
                request(block_on(backend.download(&mut buffer, 60..65)).map(|_| ()));
                let odd = Layout { offset: 2, batch_stride: 0, row_stride: 0, head_stride: 0 };
                let extent = Extent { batch: 1, rows: 1, heads: 1, row_bytes: 4 };
                request(backend.repack((&short, odd), (&mut buffer, odd), extent));
            },
        ),
    ]
}
