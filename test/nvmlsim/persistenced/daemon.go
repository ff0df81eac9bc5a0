// Package persistenced stands for the daemon nvidia-persistenced of a simulated node. It keeps GPUs
// open, so that they cannot be unbound from NVIDIA's kernel driver, and closes one when a call
// through its socket says so. The protocol and the answers are those of version 595.71.05
// (https://github.com/NVIDIA/nvidia-persistenced).
package persistenced

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvmlsim/layout"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvmlsim/state"
)

// The ONC RPC program of nvpd_rpc.h, with the results that this daemon has.
const (
	program          = 35006
	version          = 1
	setMode, getMode = 1, 2

	ok, deviceNotFound, driverFailed, invalidArgument, permissions = 0, 2, 3, 5, 7
)

// Daemon is a running daemon.
type Daemon struct {
	config   *layout.Config
	state    string
	listener *net.UnixListener
	process  string // its directory in the node's /proc

	mu   sync.Mutex // the daemon serves one call at a time
	open map[int]*state.File
}

// Start opens all GPUs that NVIDIA's driver has and serves the socket in the driver root.
func Start(root string) (*Daemon, error) {
	config, err := layout.Load(root)
	if err != nil {
		return nil, err
	}
	socket := filepath.Join(config.DriverRoot(), "run/nvidia-persistenced/socket")
	if err := os.MkdirAll(filepath.Dir(socket), 0o755); err != nil {
		return nil, err
	}
	d := &Daemon{
		config: config, state: layout.StatePath(root), open: map[int]*state.File{},
		process: filepath.Join(root, "proc", fmt.Sprint(os.Getpid())),
	}
	if err := os.MkdirAll(filepath.Join(d.process, "fd"), 0o755); err != nil {
		return nil, err
	}
	if err := os.WriteFile(filepath.Join(d.process, "comm"), []byte("nvidia-persiste\n"), 0o644); err != nil {
		return nil, err
	}
	for gpu := range config.Node.GPUs {
		if err := d.openGPU(gpu); err != nil {
			return nil, errors.Join(err, d.close())
		}
	}
	_ = os.Remove(socket) // of a daemon that was killed
	if d.listener, err = net.ListenUnix("unix", &net.UnixAddr{Name: socket, Net: "unix"}); err != nil {
		return nil, errors.Join(err, d.close())
	}
	return d, nil
}

// Serve serves calls until the context ends.
func (d *Daemon) Serve(ctx context.Context) error {
	defer context.AfterFunc(ctx, func() { _ = d.listener.Close() })()
	for {
		connection, err := d.listener.AcceptUnix()
		if errors.Is(err, net.ErrClosed) {
			return d.close()
		}
		if err != nil {
			return errors.Join(err, d.close())
		}
		go func() {
			defer func() { _ = connection.Close() }()
			for d.serveCall(connection) == nil {
			}
		}()
	}
}

func (d *Daemon) close() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	failed := os.RemoveAll(d.process)
	for gpu := range d.open {
		failed = errors.Join(failed, d.closeGPU(gpu))
	}
	return failed
}

// openGPU opens a GPU. One that NVIDIA's driver does not have stays closed.
func (d *Daemon) openGPU(gpu int) error {
	f, err := state.Open(d.state)
	if err != nil {
		return err
	}
	if !f.GPU(gpu).Attached() {
		return f.Close()
	}
	if err := f.Attach(gpu); err != nil {
		return errors.Join(err, f.Close())
	}
	d.open[gpu] = f
	return os.Symlink(filepath.Join(d.config.DeviceDir(), fmt.Sprintf("nvidia%d", f.GPU(gpu).Minor)), d.descriptor(gpu))
}

func (d *Daemon) closeGPU(gpu int) error {
	err := errors.Join(d.open[gpu].Close(), os.RemoveAll(d.descriptor(gpu)))
	delete(d.open, gpu)
	return err
}

// descriptor is the daemon's descriptor of the GPU in the node's /proc.
func (d *Daemon) descriptor(gpu int) string { return filepath.Join(d.process, "fd", fmt.Sprint(3+gpu)) }

// serveCall reads one call and answers it.
func (d *Daemon) serveCall(connection *net.UnixConn) error {
	var mark uint32
	if err := binary.Read(connection, binary.BigEndian, &mark); err != nil {
		return err
	}
	const last, longest = 1 << 31, 1 << 12
	if mark&last == 0 || mark&^last > longest {
		return fmt.Errorf("a record with the mark %#x", mark)
	}
	body := make([]byte, mark&^last)
	if _, err := io.ReadFull(connection, body); err != nil {
		return err
	}
	words := make([]uint32, len(body)/4)
	for i := range words {
		words[i] = binary.BigEndian.Uint32(body[4*i:])
	}
	// id, call, RPC version, program, version, procedure, two empty credentials, arguments
	const header = 10
	if len(words) < header || words[1] != 0 || words[2] != 2 || words[7] != 0 || words[9] != 0 {
		return fmt.Errorf("no call: %v", words)
	}
	const reply, accepted, done, noProgram, wrongVersion, noProcedure, garbage = 1, 0, 0, 1, 2, 3, 4
	answer := func(status uint32, result ...uint32) error {
		record := []uint32{0, words[0], reply, accepted, 0, 0, status}
		record = append(record, result...)
		record[0] = last | uint32(4*(len(record)-1))
		return binary.Write(connection, binary.BigEndian, record)
	}
	procedure, arguments := words[5], words[header:]
	switch {
	case words[3] != program:
		return answer(noProgram)
	case words[4] != version:
		return answer(wrongVersion, version, version)
	case procedure == setMode && len(arguments) == 5:
		return answer(done, d.setMode(connection, arguments))
	case procedure == getMode && len(arguments) == 4:
		return answer(done, d.mode(arguments)...)
	case procedure == setMode || procedure == getMode:
		return answer(garbage)
	default:
		return answer(noProcedure)
	}
}

// find returns the GPU at the address, whose function the daemon ignores.
func (d *Daemon) find(address []uint32) int {
	for i, g := range d.config.Node.GPUs {
		if g.PCI == fmt.Sprintf("%04x:%02x:%02x.0", address[0], address[1], address[2]) {
			return i
		}
	}
	return -1
}

func (d *Daemon) mode(arguments []uint32) []uint32 {
	d.mu.Lock()
	defer d.mu.Unlock()
	gpu := d.find(arguments)
	switch {
	case gpu < 0:
		return []uint32{deviceNotFound}
	case d.open[gpu] != nil:
		return []uint32{ok, 1}
	default:
		return []uint32{ok, 0}
	}
}

func (d *Daemon) setMode(caller *net.UnixConn, arguments []uint32) uint32 {
	d.mu.Lock()
	defer d.mu.Unlock()
	if !fromRoot(caller) {
		return permissions
	}
	gpu, mode := d.find(arguments), arguments[4]
	switch {
	case gpu < 0:
		return deviceNotFound
	case mode > 1:
		return invalidArgument
	case (mode == 1) == (d.open[gpu] != nil):
		return ok
	case mode == 0:
		if d.closeGPU(gpu) != nil {
			return driverFailed
		}
		return ok
	default: // after a rebind it opens only the first GPU (dra-driver-nvidia-gpu#1037)
		return driverFailed
	}
}

func fromRoot(caller *net.UnixConn) bool {
	raw, err := caller.SyscallConn()
	if err != nil {
		return false
	}
	root := false
	err = raw.Control(func(fd uintptr) {
		peer, err := unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED)
		root = err == nil && peer.Uid == 0
	})
	return err == nil && root
}
