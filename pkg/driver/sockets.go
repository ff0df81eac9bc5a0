package driver

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"syscall"
	"time"

	"k8s.io/klog/v2"
)

// removeStaleSockets removes the sockets of plugin instances that were killed, because the kubelet
// would keep dialing them. It keeps sockets that accept connections.
func removeStaleSockets(ctx context.Context, pluginDir, registrarDir string) error {
	// The only error of Glob is an invalid pattern.
	serving, _ := filepath.Glob(filepath.Join(pluginDir, "dra*.sock"))
	registering, _ := filepath.Glob(filepath.Join(registrarDir, DriverName+"-*reg.sock"))
	var errs []error
	for _, path := range append(serving, registering...) {
		if !isStale(ctx, path) {
			continue
		}
		if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
			errs = append(errs, fmt.Errorf("remove stale socket of a killed instance: %w", err))
			continue
		}
		klog.FromContext(ctx).Info("Removed stale socket of a killed instance", "path", path)
	}
	return errors.Join(errs...)
}

func isStale(ctx context.Context, path string) bool {
	dialer := net.Dialer{Timeout: time.Second}
	conn, err := dialer.DialContext(ctx, "unix", path)
	if err == nil {
		_ = conn.Close()
		return false
	}
	return errors.Is(err, syscall.ECONNREFUSED)
}
