//! The server with tabs that are no browsers: the same protocol over real WebTransport, the CPU as
//! their device.
#![expect(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use std::net::{Ipv4Addr, SocketAddr};
use std::rc::Rc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use kyklos::backend::cpu::CpuBackend;
use kyklos::backend::{Backend, Device};
use kyklos::local::on_threads;
use kyklos::{Attention, Error, Execution, Mask, Mesh, Session, Strategy, Tensor};
use kyklos_tab::native::{LIMITS, connect, on_thread, parts, tab};
use kyklos_tab::{TabServer, TabServerOptions, execute};
use kyklos_transport::in_process_group;

const PATIENCE: Duration = Duration::from_secs(60);

fn server() -> TabServer {
    let here = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
    let page = "http://localhost:8000/tab.html".to_owned();
    TabServer::start(&TabServerOptions { bind: here, addresses: vec![here], page }).unwrap()
}

/// Three ranks, of which the last two may have devices of their own. Gives o of all ranks.
fn ring(devices: [Device; 3], tokens: usize) -> Vec<Result<Vec<f32>, Error>> {
    let devices = &devices;
    on_threads(in_process_group(3), |transport| {
        let rank = transport.rank().0 as usize;
        let mut session = Session::new(transport, devices[rank].clone());
        let values = |heads: usize, factor: f32| {
            (0..tokens * heads * 32)
                .map(|index| ((rank * 7919 + index) as f32 * factor).sin())
                .collect::<Vec<_>>()
        };
        let tensor = |heads, factor| Tensor::new([1, tokens, heads, 32], values(heads, factor)).unwrap();
        let [q, k, v] = [tensor(4, 0.71), tensor(2, 0.37), tensor(2, 0.53)];
        let execution = Execution::new().mesh(Mesh::new(1, 3)?).strategy(Strategy::Ring);
        let call = Attention::new().mask(Mask::causal()).execution(execution);
        let mut o = session.attend(&call, &q, &k, &v)?.o;
        // The second layer takes what the device holds.
        o = session.attend(&call, &o, &k, &v)?.o;
        o.to_vec::<f32>()
    })
}

#[test]
fn a_ring_with_two_tabs_gives_the_bytes_of_a_ring_without() {
    let server = server();
    let [first, second] = [server.invite().unwrap(), server.invite().unwrap()];
    let tabs = [tab(first.link(), None, usize::MAX), tab(second.link(), None, usize::MAX)];
    let devices = [
        Device::cpu(),
        Device::new(first.wait(PATIENCE).unwrap()),
        Device::new(second.wait(PATIENCE).unwrap()),
    ];
    assert_eq!(devices[1].info().backend, "tab");
    let with = ring(devices, 100);
    let without = ring([Device::cpu(), Device::cpu(), Device::cpu()], 100);
    for (with, without) in with.into_iter().zip(without) {
        assert_eq!(with.unwrap(), without.unwrap());
    }
    for tab in tabs {
        assert_eq!(tab.join().unwrap(), "the host has ended the work");
    }
}

#[test]
fn a_tab_that_closes_in_the_middle_is_a_device_that_failed() {
    let server = server();
    let invitation = server.invite().unwrap();
    // Less than its queries, keys and values.
    let tab = tab(invitation.link(), None, 200_000);
    let device = Device::new(invitation.wait(PATIENCE).unwrap());
    let began = Instant::now();
    let results = ring([Device::cpu(), device, Device::cpu()], 1000);
    let errors: Vec<_> = results.into_iter().map(|result| result.unwrap_err().to_string()).collect();
    assert!(errors[1].contains("the tab was closed"), "{errors:?}");
    assert!(
        errors.iter().all(|error| error.contains("rank 1") || error.contains("the tab was closed")),
        "{errors:?}"
    );
    assert!(began.elapsed() < PATIENCE, "{:?}", began.elapsed());
    assert_eq!(tab.join().unwrap(), "taken enough");
}

#[test]
fn wrong_tokens_used_links_and_ended_links_are_refused_in_words() {
    let server = server();
    let invitation = server.invite().unwrap();
    let unknown = "the host knows no such link: it has ended, or the link is not complete";
    for token in ["", "00", &"0".repeat(32), &"é".repeat(5000)] {
        assert_eq!(tab(invitation.link(), Some(token), usize::MAX).join().unwrap(), unknown);
    }
    let link = invitation.link().to_owned();
    let first = tab(&link, None, usize::MAX);
    let device = invitation.wait(PATIENCE).unwrap();
    let used = "this link was used: the host prints a new one for each tab";
    assert_eq!(tab(&link, None, usize::MAX).join().unwrap(), used);
    // The first tab does not notice.
    pollster::block_on(device.wait()).unwrap();
    drop(device);
    assert_eq!(first.join().unwrap(), "the host has ended the work");
    let ended = server.invite().unwrap();
    let link = ended.link().to_owned();
    drop(ended);
    assert_eq!(tab(&link, None, usize::MAX).join().unwrap(), unknown);
}

#[test]
fn nobody_came() {
    let error = server().invite().unwrap().wait(Duration::from_millis(50)).unwrap_err();
    assert!(error.to_string().contains("nobody has opened the link within"), "{error}");
}

#[test]
fn garbage_and_silence_before_a_token_end_the_connection() {
    let server = server();
    let invitation = server.invite().unwrap();
    let link = invitation.link().to_owned();
    for garbage in [&b"GET / HTTP/1.1\r\n\r\n"[..], &[255; 64], &[1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1], &[]]
    {
        let link = link.clone();
        let ended = on_thread(async move || {
            let (_endpoint, connection, mut send, _receive) = connect(&link).await;
            send.write_all(garbage).await.unwrap();
            let began = Instant::now();
            connection.closed().await;
            began.elapsed()
        });
        let took = ended.join().unwrap();
        assert!(took < PATIENCE, "{took:?}");
    }
    // An honest tab comes after them.
    let tab = tab(&link, None, usize::MAX);
    drop(invitation.wait(PATIENCE).unwrap());
    assert_eq!(tab.join().unwrap(), "the host has ended the work");
}

#[test]
fn a_tab_that_stops_reading_and_answering_is_lost() {
    let server = server();
    let invitation = server.invite().unwrap();
    let link = invitation.link().to_owned();
    let tab = on_thread(async move || {
        let (_endpoint, connection, mut send, _receive) = connect(&link).await;
        let (to_host, mut outgoing) = tokio::sync::mpsc::unbounded_channel::<Bytes>();
        let token = parts(&link)["token"].clone();
        let (_inbox, _work) =
            execute(CpuBackend::new(), LIMITS, &token, Rc::new(move |bytes| drop(to_host.send(bytes))));
        let hello = outgoing.recv().await.unwrap();
        send.write_all(&hello).await.unwrap();
        // Its system still acknowledges packets.
        connection.closed().await;
    });
    let began = Instant::now();
    let device = invitation.wait(PATIENCE).unwrap();
    let error = pollster::block_on(device.wait()).unwrap_err();
    assert!(error.to_string().contains("the tab has not answered for 10 s"), "{error}");
    assert!((8..60).contains(&began.elapsed().as_secs()), "{:?}", began.elapsed());
    tab.join().unwrap();
}

#[test]
fn pages_without_an_address_are_refused() {
    let here = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
    for (page, addresses) in [("ftp://x/", vec![here]), ("http://x/#y", vec![here]), ("https://x/", vec![])] {
        let options = TabServerOptions { bind: here, addresses, page: page.to_owned() };
        assert!(matches!(TabServer::start(&options), Err(Error::Request { .. })), "{page}");
    }
}
