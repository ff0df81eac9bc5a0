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

// Inotify instances are few: fs.inotify.max_user_instances, 128 by default, is for all processes of root on this host, those in containers and in our
// machines included. Where clusters need more the limit is raised for as long as there are any.

// What was counted: 7 for a control plane, 8 for a node (kubelet 6, containerd 2), and one for each plugin that watches files. On the unified cgroup
// hierarchy containerd takes one more for each container, sandboxes included.
const (
	perControlPlane = 8
	perNode         = 10
	perNodesPods    = 14
	perNodesCgroups = 64
	forTheHost      = 64
)

// leastInstances is what a cluster takes without any Pod.
func leastInstances(nodes int) int { return perControlPlane + perNode*nodes }

// enoughInstances is what a cluster can be expected to take.
func enoughInstances(nodes int, unified bool) int {
	enough := leastInstances(nodes) + perNodesPods*nodes
	if unified {
		enough += perNodesCgroups * nodes
	}
	return enough
}

// errInstancesTaken says that there will be enough inotify instances when other clusters are down.
var errInstancesTaken = errors.New("other clusters take too many inotify instances")

// inotifyLimit is the host's limit, and how to give it back as it was found. Callers hold the lock of the folder of all clusters.
type inotifyLimit struct {
	setting string // the kernel's file
	record  string // what was found; there while the limit is raised
	bootID  string // of the host: a boot sets the limit anew
	unified bool   // the cgroup hierarchy
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
		record:  filepath.Join(stateRoot, "inotify.json"), // no cluster can have this name
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

// provide sees to it that a cluster of so many nodes finds instances beside the others, given by their numbers of nodes. say takes a line for people.
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
		return fmt.Errorf("a cluster of %d nodes takes at least %d inotify instances, %d are free, and fs.inotify.max_user_instances (%d) cannot be raised to %d: %w "+
			"(raise it on the host: sysctl fs.inotify.max_user_instances=%d)", nodes, least, free, limit, wanted, cause, wanted)
	}
	return nil
}

// raise writes down what it found before it sets the limit, so that a killed process leaves what the next one can undo.
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

// restore gives the limit back as it was found, unless someone else has set it since.
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

// freeInstances counts how many instances could be had, by having them for a moment: nothing else tells what other containers on this host have taken.
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
