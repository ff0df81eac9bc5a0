package driver

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"syscall"
	"time"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"
	"k8s.io/klog/v2"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/config"
)

// maxSocketPath is the length of the longest path of a Unix socket: sun_path has 108 bytes with the
// final zero.
const maxSocketPath = 107

// socketID returns what distinguishes the sockets of this plugin instance from those of another:
// the UID of its Pod. Where the kubelet's root is so deep that a socket's path would be too long,
// it returns a hash of the UID. It returns an error if that does not help either.
func socketID(cfg *config.Config) (types.UID, error) {
	if cfg.PodUID == "" {
		return "", checkSocketPaths(cfg, "dra.sock", DriverName+"-reg.sock")
	}
	sum := sha256.Sum256([]byte(cfg.PodUID))
	var err error
	for _, id := range []types.UID{types.UID(cfg.PodUID), types.UID(hex.EncodeToString(sum[:4]))} {
		// These are the names that kubeletplugin.Start chooses.
		registrar := kubeletplugin.RollingUpdateRegistrarSocketFile(cfg.RegistrarDir, DriverName, id)
		if err = checkSocketPaths(cfg, fmt.Sprintf("dra-%s.sock", id), registrar); err == nil {
			return id, nil
		}
	}
	return "", err
}

// checkSocketPaths returns an error if the path of a socket is too long.
func checkSocketPaths(cfg *config.Config, serving, registering string) error {
	for _, path := range []string{filepath.Join(cfg.PluginDir, serving), filepath.Join(cfg.RegistrarDir, registering)} {
		if len(path) > maxSocketPath {
			return fmt.Errorf("the path of the socket %s has %d bytes, and Linux takes at most %d: give the kubelet a shorter root directory",
				path, len(path), maxSocketPath)
		}
	}
	return nil
}

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
