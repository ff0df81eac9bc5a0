package clusterharness

import (
	"context"
	"fmt"
	"io"
	"path/filepath"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/gpu-dra-driver/gpu-dra-driver/test/cluster"
)

// These are the Helm release, its namespace, and the image that the chart's test values name.
const (
	Release   = "gpu-dra-driver"
	Namespace = "gpu-dra-driver"
	Image     = "localhost/gpu-dra-driver:test"
)

// Chart returns the path of the Helm chart. root is the checkout.
func Chart(root string) string { return filepath.Join(root, "deployments", "helm", "gpu-dra-driver") }

// Values returns the path of the chart's values file for simulated nodes. root is the checkout.
func Values(root string) string { return filepath.Join(root, "test", "e2e", "values.yaml") }

// InstallArguments returns helm's arguments to install or upgrade the chart and to wait until every
// plugin is ready. more are further arguments.
//
// They contain --wait=legacy because Helm 4's --wait=watcher does not work on an upgrade. It waits
// until the Pods of the MPS supervisor are replaced, and an upgrade leaves them running.
func InstallArguments(root string, more ...string) []string {
	return append([]string{
		"upgrade", "--install", Release, Chart(root), "--namespace", Namespace, "--create-namespace",
		"--values", Values(root), "--wait=legacy", "--timeout", "10m",
	}, more...)
}

// Install installs or upgrades the chart, and makes the kubelets read the plugins' ConfigMap.
func Install(ctx context.Context, c *cluster.Cluster, root string, more ...string) error {
	if _, err := c.Helm(ctx, InstallArguments(root, more...)...); err != nil {
		return err
	}
	return refreshPlugins(ctx, c)
}

// refreshPlugins changes an annotation of the plugins' Pods, which makes the kubelets read their
// ConfigMap at once, and not within a minute. After an upgrade a listed Pod of the old version may
// be gone before its annotation.
func refreshPlugins(ctx context.Context, c *cluster.Cluster) error {
	client, err := c.Client()
	if err != nil {
		return err
	}
	pods := client.CoreV1().Pods(Namespace)
	plugins, err := pods.List(ctx, metav1.ListOptions{LabelSelector: "app.kubernetes.io/component=kubelet-plugin"})
	if err != nil {
		return err
	}
	patch := fmt.Appendf(nil, `{"metadata":{"annotations":{"example.com/installed":"%d"}}}`, time.Now().UnixNano())
	for i := range plugins.Items {
		_, err := pods.Patch(ctx, plugins.Items[i].Name, types.MergePatchType, patch, metav1.PatchOptions{})
		if err != nil && !apierrors.IsNotFound(err) {
			return fmt.Errorf("annotate Pod %s: %w", plugins.Items[i].Name, err)
		}
	}
	return nil
}

// BuildImage builds the production image if its sources have changed, and returns the path of its
// archive.
func BuildImage(ctx context.Context, root string, output io.Writer) (archive string, err error) {
	return cluster.BuildImage(ctx, cluster.ImageBuild{
		Dockerfile: filepath.Join(root, "Dockerfile"), Tag: Image, Arguments: map[string]string{"VERSION": "test"},
	}, output)
}
