package driver

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/klog/v2"
)

// cleanUpIfUninstalled cleans up the node if the DaemonSet was deleted and no other plugin instance
// runs on the node. It deletes the node's ResourceSlices. If no claim on the node is prepared, it
// also removes the driver's files.
func (d *Driver) cleanUpIfUninstalled(ctx context.Context) {
	logger := klog.FromContext(ctx)
	if d.cfg.DaemonSetName == "" {
		return
	}
	lookupCtx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	gone, err := daemonSetGone(lookupCtx, d.client, d.cfg.Namespace, d.cfg.DaemonSetName)
	if err != nil {
		logger.Error(err, "Failed to check whether the driver was uninstalled; skipping cleanup of the node")
		return
	}
	if !gone {
		return
	}
	alone, err := d.instanceLock.TryExclusive()
	if err != nil {
		logger.Error(err, "Failed to check for other instances of the plugin; skipping cleanup of the node")
		return
	}
	if !alone {
		logger.Info("Skipped cleanup of the node: another instance of the plugin runs on it and cleans up when that instance ends")
		return
	}
	if err := d.deleteSlices(lookupCtx); err != nil {
		logger.Error(err, "Failed to delete this node's ResourceSlices; the kubelet deletes them soon")
	}
	held, err := d.preparer.Usage()
	if err != nil || held.Claims > 0 {
		logger.Info("Skipped cleanup of the node: Pods of prepared claims need the driver's files", "claims", held.Claims, "err", err)
		return
	}
	d.switchOffMIGModes(ctx)
	left, err := d.removeNodeFiles(ctx)
	switch {
	case err != nil:
		logger.Error(err, "Failed to remove all files of the driver from the node")
	case len(left) > 0:
		logger.Info("Removed the driver's files from the node; kept the plugin directory because it contains other files",
			"directory", d.cfg.PluginDir, "left", left)
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
func (d *Driver) deleteSlices(ctx context.Context) error {
	err := d.client.ResourceV1().ResourceSlices().DeleteCollection(ctx, metav1.DeleteOptions{}, metav1.ListOptions{
		FieldSelector: fmt.Sprintf("%s=%s,%s=%s", resourceapi.ResourceSliceSelectorNodeName, d.cfg.NodeName,
			resourceapi.ResourceSliceSelectorDriver, DriverName),
	})
	if err != nil {
		return fmt.Errorf("delete this node's ResourceSlices: %w", err)
	}
	return nil
}

// removeNodeFiles removes the driver's files from the node. left has the paths of files in the
// plugin directory that the driver did not create. The directory stays if there are any.
func (d *Driver) removeNodeFiles(ctx context.Context) (left []string, err error) {
	err = errors.Join(d.stopDaemons(ctx), d.specs.RemoveBase(), d.hook.Remove(), d.mpsHook.Remove())
	left, dirErr := removePluginDir(d.cfg.PluginDir, d.cfg.StateDir())
	return left, errors.Join(err, dirErr)
}

// removePluginDir removes the driver's files in the plugin directory, and the directory itself if
// it is empty then. Otherwise it returns the paths of the files that are left.
func removePluginDir(pluginDir, stateDir string) (left []string, err error) {
	errs := []error{os.RemoveAll(stateDir)}
	// A plugin process that was killed while it wrote its request for the leader lock leaves a
	// temporary file with such a name.
	unfinished, _ := filepath.Glob(filepath.Join(pluginDir, "publisher.request.*"))
	for _, path := range unfinished {
		errs = append(errs, os.Remove(path))
	}
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
	return listBelow(pluginDir)
}

// listBelow lists the files and directories below dir. A missing dir counts as empty.
func listBelow(dir string) (paths []string, err error) {
	err = filepath.WalkDir(dir, func(path string, _ fs.DirEntry, err error) error {
		if errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		if err != nil {
			return fmt.Errorf("list what is left in %s: %w", dir, err)
		}
		if path != dir {
			paths = append(paths, path)
		}
		return nil
	})
	return paths, err
}
