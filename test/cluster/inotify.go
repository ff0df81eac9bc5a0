package cluster

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"

	"golang.org/x/sys/unix"

	"github.com/gpu-dra-driver/gpu-dra-driver/test/cluster/internal/cgroup"
)

// A host allows few inotify instances. fs.inotify.max_user_instances, 128 by default, is the limit
// for all processes of root on this host, including containers and the cluster's machines. This
// file raises the limit while clusters need more.

// These numbers are a little higher than what was measured: 7 instances for a control plane, 8 for
// a node (kubelet 6, containerd 2), and one for each plugin that watches files. On cgroup v2
// containerd takes one more for each container, including sandboxes.
const (
	perControlPlane = 8
	perNode         = 10
	perNodesPods    = 14
	perNodesCgroups = 64
	forTheHost      = 64
)

// leastInstances returns how many inotify instances a cluster without any Pod needs.
func leastInstances(nodes int) int { return perControlPlane + perNode*nodes }

// enoughInstances returns how many inotify instances a cluster with Pods is expected to need.
// unified says that the host has cgroup v2 only.
func enoughInstances(nodes int, unified bool) int {
	enough := leastInstances(nodes) + perNodesPods*nodes
	if unified {
		enough += perNodesCgroups * nodes
	}
	return enough
}

// errInstancesTaken means that too few inotify instances are free now, but that enough become free
// when other clusters are taken down. So the new cluster can wait.
var errInstancesTaken = errors.New("other clusters take too many inotify instances")

// inotifyLimit reads, raises and restores the host's limit of inotify instances. Callers hold the
// lock of stateRoot, the folder of all clusters.
type inotifyLimit struct {
	setting string // path of the kernel's file with the limit
	record  string // path of the file with the old limit; it exists while the limit is raised
	bootID  string // the host's boot ID; a boot resets the limit
	unified bool   // whether the host has cgroup v2 only
	free    func(atMost int) int
	write   func(setting string, limit int) error
}

func hostsInotifyLimit() (*inotifyLimit, error) {
	id, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return nil, err
	}
	return &inotifyLimit{
		setting: "/proc/sys/fs/inotify/max_user_instances",
		record:  filepath.Join(stateRoot, "inotify.json"), // no cluster can be called inotify.json
		bootID:  string(bytes.TrimSpace(id)),
		unified: cgroup.Unified(),
		free:    freeInstances,
		write:   writeSetting,
	}, nil
}

type raisedLimit struct {
	Found  int    `json:"found"`
	Raised int    `json:"raised"`
	BootID string `json:"bootID"`
}

// provide raises the host's inotify limit if a cluster with that many nodes needs it. If the limit
// cannot be raised, provide returns errInstancesTaken if waiting helps, and another error if fewer
// than leastInstances are free. others are the node counts of the other clusters.
func (l *inotifyLimit) provide(nodes int, others []int, say func(format string, args ...any)) error {
	limit, err := l.read()
	if err != nil {
		return err
	}
	need := enoughInstances(nodes, l.unified)
	all := need
	for _, other := range others {
		all += enoughInstances(other, l.unified)
	}
	free := l.free(need)
	if limit >= all+forTheHost && free >= need {
		return nil
	}
	wanted := max(all+forTheHost, limit+need-free)
	cause := l.raise(limit, wanted)
	if cause == nil {
		say("fs.inotify.max_user_instances is raised from %d to %d while there are clusters", limit, wanted)
		return nil
	}
	if len(others) > 0 && (limit < all || free < need) {
		return fmt.Errorf("%w, and fs.inotify.max_user_instances (%d) cannot be raised to %d: %w", errInstancesTaken, limit, wanted, cause)
	}
	if least := leastInstances(nodes); free < least {
		return fmt.Errorf(
			"a cluster of %d nodes takes at least %d inotify instances, %d are free, and fs.inotify.max_user_instances (%d) cannot be raised "+
				"to %d: %w "+
				"(raise it on the host: sysctl fs.inotify.max_user_instances=%d)",
			nodes,
			least,
			free,
			limit,
			wanted,
			cause,
			wanted,
		)
	}
	return nil
}

// raise writes the old limit to disk before it sets the new one. So if this process is killed, a
// later process can restore the old limit.
func (l *inotifyLimit) raise(found, wanted int) error {
	raised := raisedLimit{Found: found, Raised: wanted, BootID: l.bootID}
	if before, err := l.recorded(); err == nil && before.BootID == l.bootID && before.Raised == found {
		raised.Found = before.Found
	}
	content, err := json.Marshal(raised)
	if err != nil {
		return err
	}
	old, oldErr := os.ReadFile(l.record)
	if err := writeAtomically(l.record, content); err != nil {
		return err
	}
	err = l.write(l.setting, wanted)
	if err == nil {
		return nil
	}
	if oldErr == nil {
		return errors.Join(err, writeAtomically(l.record, old))
	}
	return errors.Join(err, os.Remove(l.record))
}

// restore sets the limit back to what it was before raise. If someone else has changed the limit
// since, it changes nothing.
func (l *inotifyLimit) restore() error {
	raised, err := l.recorded()
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err == nil && raised.BootID == l.bootID {
		limit, err := l.read()
		if err != nil {
			return err
		}
		if limit == raised.Raised {
			if err := l.write(l.setting, raised.Found); err != nil {
				return fmt.Errorf("set fs.inotify.max_user_instances back to %d: %w", raised.Found, err)
			}
		}
	}
	return os.Remove(l.record)
}

func (l *inotifyLimit) recorded() (raisedLimit, error) {
	var raised raisedLimit
	content, err := os.ReadFile(l.record)
	if err != nil {
		return raised, err
	}
	return raised, json.Unmarshal(content, &raised)
}

func (l *inotifyLimit) read() (int, error) {
	content, err := os.ReadFile(l.setting)
	if err != nil {
		return 0, fmt.Errorf("read the host's inotify limit: %w", err)
	}
	limit, err := strconv.Atoi(string(bytes.TrimSpace(content)))
	if err != nil {
		return 0, fmt.Errorf("read the host's inotify limit from %s: %w", l.setting, err)
	}
	return limit, nil
}

func writeSetting(setting string, limit int) error {
	file, err := os.OpenFile(setting, os.O_WRONLY|os.O_TRUNC, 0)
	if err != nil {
		return err
	}
	_, err = fmt.Fprintln(file, limit)
	return errors.Join(err, file.Close())
}

// freeInstances counts the free inotify instances by opening them for a moment, and stops at
// atMost. No counter of the kernel shows how many the other containers on this host use.
func freeInstances(atMost int) int {
	var had []int
	defer func() {
		for _, fd := range had {
			_ = unix.Close(fd)
		}
	}()
	for len(had) < atMost {
		fd, err := unix.InotifyInit1(unix.IN_CLOEXEC)
		if err != nil {
			break
		}
		had = append(had, fd)
	}
	return len(had)
}
