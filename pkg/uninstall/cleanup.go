package uninstall

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/klog/v2"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/events"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/inventory"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/predecessor"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/prepare/ledger"
)

const (
	// requestTimeout limits the cleanup's requests to the API server.
	requestTimeout = 10 * time.Second
	// migModesTimeout limits how long the cleanup waits for GPUs to leave MIG mode.
	migModesTimeout = 10 * time.Second
)

// Claims knows the prepared claims of this node, and the MIG modes that the driver switched on.
type Claims interface {
	Usage() (ledger.Usage, error)
	DisableUnusedMIGMode(ctx context.Context, g device.GPU) (off bool, _ error)
}

// Cleaner removes the driver from the node when the plugin ends.
type Cleaner struct {
	Client kubernetes.Interface
	// Namespace and DaemonSet name the plugin's DaemonSet. Without DaemonSet nothing is cleaned up.
	Namespace, DaemonSet string
	// Node is the name of the Node. PluginDir is the plugin's directory there, and StateDir is below
	// it.
	Node, PluginDir, StateDir string

	// Lock is this instance's shared instance lock. Release gives it up.
	Lock   *InstanceLock
	Claims Claims
	// Use says whether the plugin may access the GPUs. The caller calls done after the access.
	Use func() (done func(), ok bool)
	// Snapshot has the node's GPUs.
	Snapshot func() inventory.Snapshot
	// StopDaemons stops the node's MPS daemons and removes their files.
	StopDaemons func(ctx context.Context) error
	// RemoveFiles remove the node-wide CDI spec, the metadata of claims and the hooks.
	RemoveFiles []func() error
	// EventNow writes an Event on the Node.
	EventNow func(ctx context.Context, client kubernetes.Interface, reason events.Reason, message string) error
}

// Release gives up the instance lock. The plugin must call it when it ends.
func (c *Cleaner) Release() { c.Lock.Release() }

// CleanUp cleans up the node if the DaemonSet was deleted and no other plugin instance runs on the
// node. It deletes the node's ResourceSlices. If no claim on the node is prepared, it also removes
// the driver's files. The plugin must no longer serve the kubelet.
func (c *Cleaner) CleanUp(ctx context.Context) {
	logger := klog.FromContext(ctx)
	if c.DaemonSet == "" {
		return
	}
	requests, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	gone, err := daemonSetGone(requests, c.Client, c.Namespace, c.DaemonSet)
	if err != nil {
		logger.Error(err, "Failed to check whether the driver was uninstalled; skipping cleanup of the node")
		return
	}
	if !gone {
		return
	}
	alone, err := c.Lock.TryExclusive()
	if err != nil {
		logger.Error(err, "Failed to check for other instances of the plugin; skipping cleanup of the node")
		return
	}
	if !alone {
		logger.Info("Skipped cleanup of the node: another instance of the plugin runs on it and cleans up when that instance ends")
		return
	}
	if err := c.deleteSlices(requests); err != nil {
		logger.Error(err, "Failed to delete this node's ResourceSlices; the kubelet deletes them soon")
	}
	held, err := c.Claims.Usage()
	if err != nil || held.Claims > 0 {
		logger.Info("Skipped cleanup of the node: Pods of prepared claims need the driver's files", "claims", held.Claims, "err", err)
		return
	}
	c.switchOffMIGModes(ctx)
	left, err := c.removeFiles(ctx)
	switch {
	case err != nil:
		logger.Error(err, "Failed to remove all files of the driver from the node")
	case len(left) > 0:
		logger.Info("Removed the driver's files from the node; kept the plugin directory because it contains other files",
			"directory", c.PluginDir, "left", left)
	default:
		logger.Info("Removed the driver's files from the node")
	}
}

// daemonSetGone reports whether the DaemonSet is deleted or being deleted. This tells an
// uninstallation from an update, a restart or an eviction.
func daemonSetGone(ctx context.Context, client kubernetes.Interface, namespace, name string) (bool, error) {
	ds, err := client.AppsV1().DaemonSets(namespace).Get(ctx, name, metav1.GetOptions{})
	switch {
	case apierrors.IsNotFound(err):
		return true, nil
	case err != nil:
		return false, fmt.Errorf("check whether DaemonSet %s/%s is being deleted: %w", namespace, name, err)
	}
	return ds.DeletionTimestamp != nil, nil
}

// deleteSlices deletes this node's ResourceSlices, so that the scheduler stops allocating the
// node's devices.
func (c *Cleaner) deleteSlices(ctx context.Context) error {
	err := c.Client.ResourceV1().ResourceSlices().DeleteCollection(ctx, metav1.DeleteOptions{}, metav1.ListOptions{
		FieldSelector: fmt.Sprintf("%s=%s,%s=%s", resourceapi.ResourceSliceSelectorNodeName, c.Node,
			resourceapi.ResourceSliceSelectorDriver, device.DriverName),
	})
	if err != nil {
		return fmt.Errorf("delete this node's ResourceSlices: %w", err)
	}
	return nil
}

// switchOffMIGModes switches off MIG mode on the GPUs where the driver had switched it on. If a GPU
// is in use, it stays in MIG mode, and an Event asks the admin to switch the mode off.
func (c *Cleaner) switchOffMIGModes(ctx context.Context) {
	done, ok := c.Use()
	defer done()
	if !ok {
		return // the hardware is released for a driver upgrade
	}
	failed := c.disableMIGModes(ctx)
	if failed == nil {
		return
	}
	logger := klog.FromContext(ctx)
	logger.Error(failed, "Failed to switch off MIG mode; switch it off with nvidia-smi -i ADDRESS -mig 0")
	message := "The driver was uninstalled, and " + failed.Error() + "; switch it off with nvidia-smi -i ADDRESS -mig 0"
	if err := c.EventNow(ctx, c.Client, events.MIGModeStays, message); err != nil {
		logger.Error(err, "Failed to write the Event MIGModeStays")
	}
}

// disableMIGModes switches off the GPUs' MIG modes in parallel, so that a hung GPU does not delay
// the others. It returns the errors of all GPUs.
func (c *Cleaner) disableMIGModes(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, migModesTimeout)
	defer cancel()
	gpus := c.Snapshot().Node.GPUs
	errs := make([]error, len(gpus))
	var wg sync.WaitGroup
	for i, g := range gpus {
		if g.MIG != nil {
			wg.Go(func() { _, errs[i] = c.Claims.DisableUnusedMIGMode(ctx, g.GPU) })
		}
	}
	wg.Wait()
	return errors.Join(errs...)
}

// removeFiles removes the driver's files from the node. left has the paths of what stays in the
// plugin directory: files that the driver did not create, and its notes about them.
func (c *Cleaner) removeFiles(ctx context.Context) (left []string, err error) {
	errs := []error{c.StopDaemons(ctx)}
	for _, remove := range c.RemoveFiles {
		errs = append(errs, remove())
	}
	left, err = removePluginDir(c.PluginDir, c.StateDir)
	return left, errors.Join(append(errs, err)...)
}

// isLocked reports whether path is a lock file that a process has locked.
func isLocked(path string) bool {
	if !strings.HasSuffix(path, ".lock") {
		return false
	}
	file, err := os.OpenFile(path, os.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0)
	if err != nil {
		return false
	}
	defer func() { _ = file.Close() }()
	return errors.Is(unix.Flock(int(file.Fd()), unix.LOCK_EX|unix.LOCK_NB), unix.EWOULDBLOCK)
}

// removePluginDir removes the driver's files in the plugin directory, and the directory itself if
// it is empty then. Otherwise it returns the paths of what is left in it.
func removePluginDir(pluginDir, stateDir string) (left []string, err error) {
	errs := []error{removeState(pluginDir, stateDir)}
	for _, name := range []string{"publisher.lock", "publisher.request", "bin", instanceLockFile, ""} {
		err := os.Remove(filepath.Join(pluginDir, name))
		if errors.Is(err, fs.ErrNotExist) || errors.Is(err, syscall.ENOTEMPTY) {
			continue
		}
		errs = append(errs, err)
	}
	if err := errors.Join(errs...); err != nil {
		return nil, err // left would contain the driver's own files
	}
	entries, err := os.ReadDir(pluginDir)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("list what is left: %w", err)
	}
	for _, e := range entries {
		left = append(left, filepath.Join(pluginDir, e.Name()))
	}
	return left, nil
}

// removeState removes the state directory, but not what the next installation must find: a card's
// lock that a call holds which hangs in the driver, and the notes about ended claims of NVIDIA's
// DRA driver while its checkpoint is there, since nothing would end these claims again. This
// process still has the instance lock, so no other call begins.
func removeState(pluginDir, dir string) error {
	_, err := os.Lstat(filepath.Join(pluginDir, predecessor.File))
	keepNotes := !errors.Is(err, fs.ErrNotExist)
	entries, err := os.ReadDir(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	errs := []error{err}
	for _, e := range entries {
		path := filepath.Join(dir, e.Name())
		switch {
		case keepNotes && e.Name() == predecessor.Notes:
		case isLocked(path):
			errs = append(errs, fmt.Errorf("%s stays, because a call hangs in the driver: reboot the node, then remove it", path))
		default:
			errs = append(errs, os.RemoveAll(path))
		}
	}
	if err := os.Remove(dir); !errors.Is(err, syscall.ENOTEMPTY) {
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}
