// Package persistenced makes the daemon nvidia-persistenced close GPUs.
//
// The daemon keeps GPUs open, and obeys only its socket: NVML changes the persistence mode of the
// kernel's driver, not that of the daemon (dra-driver-nvidia-gpu#1038). It speaks ONC RPC (RFC
// 5531, RFC 4506). Its program is in nvpd_rpc.h of https://github.com/NVIDIA/nvidia-persistenced.
package persistenced

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"path/filepath"
	"syscall"
	"time"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia/driverroot"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia/internal/hostfile"
)

// ProcessName is the daemon's name in /proc, of which the kernel keeps 15 characters.
const ProcessName = "nvidia-persiste"

// answerLimit limits a call. The kernel's driver may need seconds to close a GPU, and the daemon
// serves one call at a time.
const answerLimit = 10 * time.Second

// Daemon is the nvidia-persistenced of a driver root. It may not run.
type Daemon struct{ socket string }

// In returns the daemon of the driver root, as this process sees it.
func In(driverRoot string) Daemon {
	const socket = "run/nvidia-persistenced/socket"
	if found, err := driverroot.Resolve(driverRoot, socket); err == nil {
		return Daemon{found}
	}
	return Daemon{filepath.Join(driverRoot, socket)}
}

// HasSocket reports whether the daemon's socket exists.
func (d Daemon) HasSocket() bool { return hostfile.Exists(d.socket) }

// The daemon's procedures, modes and results.
const (
	program, programVersion = 35006, 1
	setMode, getMode        = 1, 2

	modeDisabled, modeEnabled = 0, 1

	success, deviceNotFound = 0, 2
)

// Keeps reports whether the daemon keeps the GPU open.
func (d Daemon) Keeps(ctx context.Context, gpu device.PCIAddress) (bool, error) {
	result, err := d.call(ctx, getMode, gpu)
	if err != nil || len(result) == 0 {
		return false, err
	}
	if len(result) != 2 {
		return false, fmt.Errorf("nvidia-persistenced at %s answered a call about GPU %s with %v", d.socket, gpu, result)
	}
	return result[1] == modeEnabled, nil
}

// Close makes the daemon close the GPU. It succeeds if no daemon runs.
func (d Daemon) Close(ctx context.Context, gpu device.PCIAddress) error {
	_, err := d.call(ctx, setMode, gpu, modeDisabled)
	return err
}

// call returns the words of a procedure's result, or none if no daemon has the GPU.
func (d Daemon) call(ctx context.Context, procedure uint32, gpu device.PCIAddress, more ...uint32) ([]uint32, error) {
	var domain, bus, slot, function uint32
	if _, err := fmt.Sscanf(string(gpu), "%x:%x:%x.%x", &domain, &bus, &slot, &function); err != nil {
		return nil, fmt.Errorf("ask nvidia-persistenced about GPU %q: %w", gpu, err)
	}
	result, err := d.exchange(ctx, procedure, append([]uint32{domain, bus, slot, function}, more...))
	switch {
	case errors.Is(err, fs.ErrNotExist) || errors.Is(err, syscall.ECONNREFUSED):
		return nil, nil // it does not run
	case err != nil:
		return nil, fmt.Errorf("ask nvidia-persistenced at %s about GPU %s: %w", d.socket, gpu, err)
	case result[0] == deviceNotFound:
		return nil, nil
	case result[0] != success:
		return nil, fmt.Errorf("nvidia-persistenced at %s refused a call about GPU %s: NvPdStatus %d of its nvpd_rpc.h", d.socket, gpu, result[0])
	}
	return result, nil
}

// exchange sends one call and returns the words of its result, at least one.
func (d Daemon) exchange(ctx context.Context, procedure uint32, arguments []uint32) ([]uint32, error) {
	ctx, cancel := context.WithTimeout(ctx, answerLimit)
	defer cancel()
	connection, err := new(net.Dialer).DialContext(ctx, "unix", d.socket)
	if err != nil {
		return nil, err
	}
	defer func() { _ = connection.Close() }()
	stop := context.AfterFunc(ctx, func() { _ = connection.SetDeadline(time.Unix(1, 0)) })
	defer stop()
	const id, call, reply, rpcVersion, noAuth = 1, 0, 1, 2, 0
	words := append([]uint32{id, call, rpcVersion, program, programVersion, procedure, noAuth, 0, noAuth, 0}, arguments...)
	if err := writeRecord(connection, words); err != nil {
		return nil, err
	}
	words, err = readRecord(connection)
	if err != nil {
		return nil, err
	}
	// The header of an accepted reply: id, type, status, the verifier's kind and length, the call's
	// status.
	const header = 6
	if len(words) <= header || words[0] != id || words[1] != reply || words[2] != 0 || words[4] != 0 || words[5] != 0 {
		return nil, fmt.Errorf("it answered the call %v with %v", arguments, words)
	}
	return words[header:], nil
}

// lastFragment is the bit in front of a record's last fragment. Records of this protocol have one.
const lastFragment = 1 << 31

func writeRecord(to io.Writer, words []uint32) error {
	record := binary.BigEndian.AppendUint32(nil, lastFragment|uint32(4*len(words))) //nolint:gosec // few words
	for _, word := range words {
		record = binary.BigEndian.AppendUint32(record, word)
	}
	_, err := to.Write(record)
	return err
}

func readRecord(from io.Reader) ([]uint32, error) {
	const longest = 1 << 10
	var mark uint32
	if err := binary.Read(from, binary.BigEndian, &mark); err != nil {
		return nil, err
	}
	size := mark &^ lastFragment
	if mark&lastFragment == 0 || size > longest || size%4 != 0 {
		return nil, fmt.Errorf("it sent a record of %d bytes, marked %#x", size, mark)
	}
	words := make([]uint32, size/4)
	return words, binary.Read(from, binary.BigEndian, words)
}
