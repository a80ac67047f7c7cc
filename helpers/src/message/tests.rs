//! Requests and statuses as bytes.

use super::*;

#[test]
fn requests_come_back_whole_and_other_texts_are_refused() {
    let shape =
        Shape { batch: 2, q_len: 40, kv_len: 50, q_heads: 6, kv_heads: 3, head_dim: 16, dtype: Dtype::F16 };
    let call = Call {
        mask: Mask::causal(),
        scale: Some(0.3),
        softcap: Some(f32::MAX),
        sinks: vec![f32::NEG_INFINITY, 0.5, 1.0, 2.0, 3.0, 4.0],
        q_offset: 10,
        ..Call::default()
    };
    let parts = [
        Part { kv_heads: 1..2, rows: 8..40 },
        Part { kv_heads: 1..2, rows: 0..8 },
        Part { kv_heads: 2..3, rows: 0..40 },
    ];
    let work = Work::new(&call, &shape, &parts, 1000);
    let Request::Attend(back) = Request::from_bytes(&Request::Attend(work.clone()).to_bytes()).unwrap()
    else {
        panic!("another request")
    };
    assert_eq!(back, work);
    assert_eq!(back.pieces.iter().map(|piece| piece.new_keys).collect::<Vec<_>>(), [true, false, true]);
    let piece = back.piece_call(&back.pieces[0]).unwrap();
    assert_eq!((piece.q_offset, piece.sinks), (18, vec![1.0, 2.0]));
    let q_bytes = 2 * 32 * 2 * 16 * 2;
    let kv_bytes = 2 * 50 * 16 * 2;
    assert_eq!(back.input_bytes(&back.pieces[0]).unwrap(), [q_bytes, kv_bytes, kv_bytes]);
    assert_eq!(back.result_bytes(&back.pieces[0]).unwrap(), [q_bytes]);
    for wrong in ["", "{}", "{\"echo\":{}}", "{\"attend\":{\"dtype\":\"f32\"}}", "[1]"] {
        assert!(Request::from_bytes(wrong.as_bytes()).unwrap_err().is_request(), "{wrong}");
    }
    let huge = Work { batch: u32::MAX, kv_len: u32::MAX, ..work };
    assert!(huge.input_bytes(&huge.pieces[0]).unwrap_err().is_request());
}

#[test]
fn a_status_carries_a_fault_that_may_be_long() {
    for fault in [None, Some("no memory".to_owned()), Some("é".repeat(300))] {
        let status = Status { fault: fault.clone(), compute_ns: 7, waited_ns: u64::MAX };
        let back = Status::from_bytes(&status.to_bytes());
        assert_eq!((back.compute_ns, back.waited_ns), (7, u64::MAX));
        assert_eq!(back.fault.is_some(), fault.is_some());
        assert!(
            back.fault.is_none_or(|text| fault.unwrap_or_default().starts_with(&text) && !text.is_empty())
        );
    }
}
