package cluster

import (
	"bufio"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gpu-dra-driver/gpu-dra-driver/test/cluster/internal/cgroup"
)

// downTimeout bounds the removal of a cluster, which goes on when the caller's context has ended.
const downTimeout = 2 * time.Minute

// demolish removes all of a cluster: processes by their cgroup, links by their name, mounts and files by their folder. It needs no record of
// how far the cluster came, and can itself be cut off and called again. The caller holds the cluster's lock.
func demolish(ctx context.Context, name string) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), downTimeout)
	defer cancel()
	known, err := readState(name)
	recorded := err == nil // a state that is missing or unreadable was lost before links were made, or in a crash of the host that took them along
	if !recorded {
		if known.CgroupBases, err = cgroupBases(name); err != nil {
			return err
		}
	}
	if err := cgroup.Destroy(ctx, known.CgroupBases); err != nil {
		return fmt.Errorf("take cluster %s down: %w", name, err)
	}
	for _, base := range known.CgroupBases {
		_ = os.Remove(filepath.Dir(base)) // stays while another cluster is in it
	}
	if recorded {
		if err := known.Network.remove(); err != nil {
			return fmt.Errorf("take cluster %s down: %w", name, err)
		}
	}
	if err := unmountBelow(clusterDir(name)); err != nil {
		return fmt.Errorf("take cluster %s down: %w", name, err)
	}
	if err := os.RemoveAll(clusterDir(name)); err != nil {
		return fmt.Errorf("take cluster %s down: %w", name, err)
	}
	if err := leave(ctx); err != nil {
		return fmt.Errorf("take cluster %s down: %w", name, err)
	}
	return nil
}

// unmountBelow unmounts what someone mounted on the host below the folder; the machines' own mounts are gone with them.
func unmountBelow(dir string) error {
	file, err := os.Open("/proc/self/mountinfo")
	if err != nil {
		return fmt.Errorf("list mounts: %w", err)
	}
	defer func() { _ = file.Close() }()
	var points []string
	lines := bufio.NewScanner(file)
	for lines.Scan() {
		if fields := strings.Fields(lines.Text()); len(fields) > 4 && strings.HasPrefix(fields[4], dir+"/") {
			points = append(points, fields[4])
		}
	}
	if err := lines.Err(); err != nil {
		return fmt.Errorf("list mounts: %w", err)
	}
	for _, point := range slices.Backward(points) {
		if err := unix.Unmount(point, unix.MNT_DETACH); err != nil {
			return fmt.Errorf("unmount %s: %w", point, err)
		}
	}
	return nil
}
