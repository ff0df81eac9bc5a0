package cluster

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gpu-dra-driver/gpu-dra-driver/test/cluster/internal/cgroup"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/cluster/internal/toolchain"
)

// stateRoot holds a folder per cluster. It is on disk, because nodes keep their images and volumes
// there.
const stateRoot = "/var/lib/gpu-dra-driver-cluster"

// controlPlane is the name of the machine that runs no Pods.
const controlPlane = "control-plane"

// state is what a cluster stores about itself on disk. Up writes it before it creates anything
// else, so that Down can find and remove everything.
type state struct {
	Network     network   `json:"network"`
	CgroupBases []string  `json:"cgroupBases"`
	Nodes       []string  `json:"nodes"`
	Programs    *Programs `json:"programs"`
	// Complete is set when Up has succeeded for this cluster, at least once.
	Complete bool `json:"complete"`
}

func clusterDir(name string) string { return filepath.Join(stateRoot, name) }

func readState(name string) (state, error) {
	var read state
	content, err := os.ReadFile(filepath.Join(clusterDir(name), "cluster.json"))
	if err != nil {
		return read, err
	}
	if err := json.Unmarshal(content, &read); err != nil {
		return read, fmt.Errorf("decode the state of cluster %s: %w", name, err)
	}
	return read, nil
}

func writeState(name string, written state) error {
	content, err := json.MarshalIndent(written, "", "  ")
	if err != nil {
		return err
	}
	return writeAtomically(filepath.Join(clusterDir(name), "cluster.json"), content)
}

func writeAtomically(path string, content []byte) error {
	if err := os.WriteFile(path+".new", content, 0o600); err != nil {
		return err
	}
	return os.Rename(path+".new", path)
}

// reserve reserves a network and inotify instances for a new cluster and writes its first state. If
// there are too few inotify instances, it waits for other clusters to be taken down.
func reserve(ctx context.Context, name string, wanted state, progress *toolchain.Progress) (state, error) {
	for reported := false; ; reported = true {
		reserved, err := tryReserve(ctx, name, wanted, progress)
		if !errors.Is(err, errInstancesTaken) {
			return reserved, err
		}
		if !reported {
			progress.Printf("waiting for another cluster to be taken down: %v", err)
		}
		select {
		case <-ctx.Done():
			return state{}, fmt.Errorf("%w: %w", context.Cause(ctx), err)
		case <-time.After(time.Second):
		}
	}
}

func tryReserve(ctx context.Context, name string, reserved state, progress *toolchain.Progress) (state, error) {
	unlock, err := lockDir(ctx, stateRoot)
	if err != nil {
		return state{}, err
	}
	defer unlock()
	names, err := List()
	if err != nil {
		return state{}, err
	}
	taken, nodes := map[int]bool{}, []int{}
	for _, other := range names {
		if read, err := readState(other); err == nil && other != name {
			taken[read.Network.Slot] = true
			nodes = append(nodes, len(read.Nodes))
		}
	}
	if reserved.Network, err = chooseNetwork(taken); err != nil {
		return state{}, err
	}
	if reserved.CgroupBases, err = cgroupBases(name); err != nil {
		return state{}, err
	}
	limit, err := hostsInotifyLimit()
	if err != nil {
		return state{}, err
	}
	if err := limit.provide(len(reserved.Nodes), nodes, progress.Printf); err != nil {
		return state{}, err
	}
	return reserved, writeState(name, reserved)
}

// leave restores the host's inotify limit and removes stateRoot if no cluster is left on the host.
// Otherwise it does nothing.
func leave(ctx context.Context) error {
	unlock, err := lockDir(ctx, stateRoot)
	if err != nil {
		return err
	}
	defer unlock()
	names, err := List()
	if err != nil {
		return err
	}
	for _, name := range names {
		if _, err := readState(name); !errors.Is(err, fs.ErrNotExist) {
			return nil // another cluster exists
		}
	}
	limit, err := hostsInotifyLimit()
	if err != nil {
		return err
	}
	if err := limit.restore(); err != nil {
		return err
	}
	_ = os.Remove(stateRoot) // fails while another cluster has a folder there
	return nil
}

func cgroupBases(name string) ([]string, error) {
	return cgroup.Bases(filepath.Join("gpu-dra-driver-cluster", name))
}

// lockDir locks the folder dir itself, and creates it if needed. The kernel releases the lock when
// the process ends. If another process removes the folder during the wait, lockDir creates it
// again.
func lockDir(ctx context.Context, dir string) (unlock func(), err error) {
	for {
		var file *os.File
		err := os.MkdirAll(dir, 0o755)
		if err == nil {
			file, err = os.Open(dir)
		}
		if errors.Is(err, fs.ErrNotExist) {
			continue // another process removed the folder or its parent in between
		}
		if err != nil {
			return nil, fmt.Errorf("create the cluster's folder: %w", err)
		}
		if err := waitForLock(ctx, file); err != nil {
			_ = file.Close()
			return nil, fmt.Errorf("wait for another command that holds %s: %w", dir, err)
		}
		locked, err := file.Stat()
		if err != nil {
			_ = file.Close()
			return nil, err
		}
		if current, err := os.Stat(dir); err == nil && os.SameFile(locked, current) {
			return func() { _ = file.Close() }, nil
		}
		_ = file.Close()
	}
}

func waitForLock(ctx context.Context, file *os.File) error {
	for {
		err := unix.Flock(int(file.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		if !errors.Is(err, unix.EWOULDBLOCK) {
			return err
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(100 * time.Millisecond):
		}
	}
}
