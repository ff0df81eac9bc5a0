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

// leaveIfUninstalled removes what we made on the node, if the DaemonSet is gone for good and no claim needs it.
func (d *Driver) leaveIfUninstalled(ctx context.Context) {
	logger := klog.FromContext(ctx)
	if d.cfg.DaemonSetName == "" {
		return
	}
	asking, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	gone, err := daemonSetGone(asking, d.client, d.cfg.Namespace, d.cfg.DaemonSetName)
	if err != nil {
		logger.Error(err, "Leaving everything on the node in its place")
		return
	}
	if !gone {
		return
	}
	alone, err := d.presence.Alone()
	if err != nil {
		logger.Error(err, "Leaving everything on the node in its place")
		return
	}
	if !alone {
		logger.Info("The driver is being uninstalled, but another instance of it lives on this node, which goes on using what is there, or removes it when it ends")
		return
	}
	if err := d.withdraw(asking); err != nil {
		logger.Error(err, "The kubelet will do that soon")
	}
	held, err := d.preparer.Held()
	if err != nil || held.Claims > 0 {
		logger.Info("The driver is being uninstalled, but claims are held: what their Pods need stays on the node", "claims", held.Claims, "err", err)
		return
	}
	d.modesOff(ctx)
	left, err := d.leaveNode(ctx)
	switch {
	case err != nil:
		logger.Error(err, "Could not remove everything that the driver made on this node")
	case len(left) > 0:
		logger.Info("The driver is being uninstalled: removed all that it made on this node; its directory stays, because of what it did not make", "directory", d.cfg.PluginDir, "left", left)
	default:
		logger.Info("The driver is being uninstalled: removed all that it made on this node")
	}
}

// daemonSetGone tells a plugin that is being terminated whether it is being uninstalled, not updated, restarted or evicted.
func daemonSetGone(ctx context.Context, client kubernetes.Interface, namespace, name string) (bool, error) {
	ds, err := client.AppsV1().DaemonSets(namespace).Get(ctx, name, metav1.GetOptions{})
	switch {
	case apierrors.IsNotFound(err):
		return true, nil
	case err != nil:
		return false, fmt.Errorf("look whether DaemonSet %s/%s is being deleted: %w", namespace, name, err)
	}
	return ds.DeletionTimestamp != nil, nil
}

// withdraw takes back what is published for this node, so that nothing is allocated that nobody will prepare.
func (d *Driver) withdraw(ctx context.Context) error {
	err := d.client.ResourceV1().ResourceSlices().DeleteCollection(ctx, metav1.DeleteOptions{}, metav1.ListOptions{
		FieldSelector: fmt.Sprintf("%s=%s,%s=%s", resourceapi.ResourceSliceSelectorNodeName, d.cfg.NodeName, resourceapi.ResourceSliceSelectorDriver, DriverName),
	})
	if err != nil {
		return fmt.Errorf("delete this node's ResourceSlices: %w", err)
	}
	return nil
}

// leaveNode removes what the plugin made on its node. left is what is in the plugin directory that it did not make, because of which the directory stays.
func (d *Driver) leaveNode(ctx context.Context) (left []string, err error) {
	err = errors.Join(d.endDaemons(ctx), d.specs.RemoveBase(), d.hook.Remove(), d.mpsHook.Remove())
	left, dirErr := removePluginDir(d.cfg.PluginDir, d.cfg.StateDir())
	return left, errors.Join(err, dirErr)
}

// removePluginDir removes what is ours in the plugin directory, and the directory if nobody else has put anything there.
func removePluginDir(pluginDir, stateDir string) (left []string, err error) {
	errs := []error{os.RemoveAll(stateDir)}
	// What calls that were killed in the middle of a write have left.
	unfinished, _ := filepath.Glob(filepath.Join(pluginDir, "publisher.request.*"))
	for _, path := range unfinished {
		errs = append(errs, os.Remove(path))
	}
	for _, name := range []string{"publisher.lock", "publisher.request", "bin", presenceFile, ""} {
		err := os.Remove(filepath.Join(pluginDir, name))
		if errors.Is(err, fs.ErrNotExist) || errors.Is(err, syscall.ENOTEMPTY) {
			continue
		}
		errs = append(errs, err)
	}
	if err := errors.Join(errs...); err != nil {
		return nil, err // what could not be removed would be taken for somebody else's
	}
	return below(pluginDir)
}

// below lists what is in a directory. One that is not there has nothing in it.
func below(dir string) (paths []string, err error) {
	err = filepath.WalkDir(dir, func(path string, _ fs.DirEntry, err error) error {
		if errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		if err != nil {
			return fmt.Errorf("look what is left in %s: %w", dir, err)
		}
		if path != dir {
			paths = append(paths, path)
		}
		return nil
	})
	return paths, err
}
