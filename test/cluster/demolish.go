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

// downTimeout bounds the removal of a cluster, which continues after the caller's context has
// ended.
const downTimeout = 2 * time.Minute

// demolish removes everything of a cluster: it finds processes by cgroup, network links by name,
// and mounts and files by folder. So it works for a partly started cluster too, and can be
// interrupted and called again. The caller holds the cluster's lock.
func demolish(ctx context.Context, name string) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), downTimeout)
	defer cancel()
	known, err := readState(name)
	// If the stored state is missing or unreadable, there is no network link to remove: Up has not
	// created one yet, or the host has rebooted since.
	recorded := err == nil
	if !recorded {
		if known.CgroupBases, err = cgroupBases(name); err != nil {
			return err
		}
	}
	if err := cgroup.Destroy(ctx, known.CgroupBases); err != nil {
		return fmt.Errorf("take cluster %s down: %w", name, err)
	}
	for _, base := range known.CgroupBases {
		_ = os.Remove(filepath.Dir(base)) // fails while another cluster has a cgroup there
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

// unmountBelow unmounts everything that is mounted on the host below dir. The mounts in a machine's
// namespace vanish with the machine.
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
