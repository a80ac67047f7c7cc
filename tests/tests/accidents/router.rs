//! A router with address translation between one rank and rank 0.

use std::net::{Ipv4Addr, SocketAddr, UdpSocket};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

/// Passes datagrams until it is dropped.
pub(crate) struct Router {
    /// The address of rank 0 for the rank behind the router.
    pub(crate) address: SocketAddr,
    /// The socket at which rank 0 sees the rank.
    outside: Arc<Mutex<Arc<UdpSocket>>>,
    ends: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
}

impl Router {
    pub(crate) fn new(coordinator: SocketAddr) -> Self {
        let inside = socket();
        let address = inside.local_addr().unwrap();
        let outside = Arc::new(Mutex::new(socket()));
        let (ends, client) = (Arc::new(AtomicBool::new(false)), Arc::new(Mutex::new(None)));
        let out = {
            let (inside, outside) = (Arc::clone(&inside), Arc::clone(&outside));
            let (ends, client) = (Arc::clone(&ends), Arc::clone(&client));
            std::thread::spawn(move || {
                let mut packet = vec![0; 1 << 16];
                while !ends.load(Ordering::Relaxed) {
                    let Ok((length, from)) = inside.recv_from(&mut packet) else { continue };
                    *client.lock().unwrap() = Some(from);
                    let _ = outside.lock().unwrap().send_to(&packet[..length], coordinator);
                }
            })
        };
        let back = {
            let (outside, ends) = (Arc::clone(&outside), Arc::clone(&ends));
            std::thread::spawn(move || {
                let mut packet = vec![0; 1 << 16];
                while !ends.load(Ordering::Relaxed) {
                    let current = Arc::clone(&outside.lock().unwrap());
                    let Ok((length, from)) = current.recv_from(&mut packet) else { continue };
                    // Nobody else gets through.
                    if let (true, Some(client)) = (from == coordinator, *client.lock().unwrap()) {
                        let _ = inside.send_to(&packet[..length], client);
                    }
                }
            })
        };
        Self { address, outside, ends, threads: vec![out, back] }
    }

    /// From now on rank 0 sees the rank at another port, and packets to the old one are lost.
    pub(crate) fn restart(&self) {
        *self.outside.lock().unwrap() = socket();
    }
}

impl Drop for Router {
    fn drop(&mut self) {
        self.ends.store(true, Ordering::Relaxed);
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

fn socket() -> Arc<UdpSocket> {
    let socket = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    socket.set_read_timeout(Some(LONGEST_READ)).unwrap();
    Arc::new(socket)
}

/// After so long a thread looks whether the router has ended, or has another socket.
const LONGEST_READ: Duration = Duration::from_millis(20);
