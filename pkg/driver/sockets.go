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

// sockets are the paths of this plugin instance's sockets, as kubeletplugin.Start chooses them.
type sockets struct {
	// id distinguishes them from those of another instance: the UID of the Pod, or a hash of it.
	id                   types.UID
	serving, registering string
}

// socketsOf returns the instance's sockets. Where the kubelet's root is so deep that a path with
// the Pod's UID would be too long, they have a hash of the UID. It returns an error if that does
// not help either.
func socketsOf(cfg *config.Config) (sockets, error) {
	ids := []types.UID{""}
	if cfg.PodUID != "" {
		sum := sha256.Sum256([]byte(cfg.PodUID))
		ids = []types.UID{types.UID(cfg.PodUID), types.UID(hex.EncodeToString(sum[:4]))}
	}
	var err error
	for _, id := range ids {
		serving, registering := "dra.sock", DriverName+"-reg.sock"
		if id != "" {
			serving = fmt.Sprintf("dra-%s.sock", id)
			registering = kubeletplugin.RollingUpdateRegistrarSocketFile(cfg.RegistrarDir, DriverName, id)
		}
		s := sockets{id, filepath.Join(cfg.PluginDir, serving), filepath.Join(cfg.RegistrarDir, registering)}
		if err = s.checkLength(); err == nil {
			return s, nil
		}
	}
	return sockets{}, err
}

// checkLength returns an error if the path of a socket is too long.
func (s sockets) checkLength() error {
	for _, path := range []string{s.serving, s.registering} {
		if len(path) > maxSocketPath {
			return fmt.Errorf("the path of the socket %s has %d bytes, and Linux takes at most %d: give the kubelet a shorter root directory",
				path, len(path), maxSocketPath)
		}
	}
	return nil
}

// checkPresence returns an error if a socket's file was removed. The kubelet then cannot call the
// plugin, or not register it after the kubelet's next start.
func (s sockets) checkPresence() error {
	for _, path := range []string{s.serving, s.registering} {
		if _, err := os.Lstat(path); errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("the socket %s was removed: a restarted container creates it again", path)
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
