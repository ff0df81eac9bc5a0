package metadata

import (
	"bytes"
	"fmt"
	"strings"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/dynamic-resource-allocation/api/metadata"
	"k8s.io/dynamic-resource-allocation/api/metadata/install"
	"k8s.io/dynamic-resource-allocation/api/metadata/v1alpha1"
	"k8s.io/dynamic-resource-allocation/api/metadata/v1beta1"
	"k8s.io/dynamic-resource-allocation/resourceclaim"
	"tags.cncf.io/container-device-interface/specs-go"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
)

// Versions are the API versions in each file, the newest first. KubeVirt 1.8 reads only v1alpha1.
var Versions = []schema.GroupVersion{v1beta1.SchemeGroupVersion, v1alpha1.SchemeGroupVersion}

// codecs converts to the API versions.
var codecs = serializer.NewCodecFactory(install.NewScheme())

// Claim identifies the claim that a file describes.
type Claim struct {
	UID             types.UID
	Namespace, Name string
	// PodClaimName is the claim's name in the Pod's spec.resourceClaims. It is empty for a claim that
	// no template made, which containers know by its own name.
	PodClaimName string
}

// Request has the devices that one request of a claim got. Its name includes the subrequest, as in
// the claim's allocation: "gpu/large".
type Request struct {
	Name    string
	Devices []metadata.Device
}

// base returns the request's name without the subrequest. It names files, so it must be valid.
func (r Request) base() (string, error) {
	base := resourceclaim.BaseRequestRef(r.Name)
	if wrong := validation.IsDNS1123Label(base); len(wrong) > 0 {
		return "", fmt.Errorf("request %q cannot name a metadata file: %s", base, strings.Join(wrong, ", "))
	}
	return base, nil
}

// PodClaimName returns the name under which the claim with these annotations is in a Pod's spec, or
// "" if no template made it. It ignores a value that could lead to another path.
func PodClaimName(annotations map[string]string) string {
	name := annotations[podClaimAnnotation]
	if len(validation.IsDNS1123Label(name)) > 0 {
		return ""
	}
	return name
}

// Edits returns the CDI edits that show a container the file of a request. root is the directory of
// [Files]. The path in the container is defined in k8s.io/dynamic-resource-allocation/api/metadata.
func Edits(root string, c Claim, request string) (specs.ContainerEdits, error) {
	base, err := Request{Name: request}.base()
	if err != nil {
		return specs.ContainerEdits{}, err
	}
	host, err := path(root, c.UID, base)
	if err != nil {
		return specs.ContainerEdits{}, err
	}
	target := metadata.ResourceClaimFilePath(device.DriverName, c.Name, base)
	if c.PodClaimName != "" {
		target = metadata.ResourceClaimTemplateFilePath(device.DriverName, c.PodClaimName, base)
	}
	return specs.ContainerEdits{Mounts: []*specs.Mount{{
		HostPath: host, ContainerPath: target, Options: []string{"ro", "bind", "nosuid", "nodev", "noexec"},
	}}}, nil
}

// encode returns the content of the request's file: the same data in each of the versions.
func encode(c Claim, r Request, generation int64) ([]byte, error) {
	data := &metadata.DeviceMetadata{
		ObjectMeta: metav1.ObjectMeta{Namespace: c.Namespace, Name: c.Name, UID: c.UID, Generation: generation},
		Requests:   []metadata.DeviceMetadataRequest{{Name: r.Name, Devices: r.Devices}},
	}
	if c.PodClaimName != "" {
		data.PodClaimName = &c.PodClaimName
	}
	info, ok := runtime.SerializerInfoForMediaType(codecs.SupportedMediaTypes(), runtime.ContentTypeJSON)
	if !ok {
		return nil, fmt.Errorf("describe claim %s/%s: the scheme has no JSON", c.Namespace, c.Name)
	}
	var stream bytes.Buffer
	for _, v := range Versions {
		if err := codecs.EncoderForVersion(info.PrettySerializer, v).Encode(data, &stream); err != nil {
			return nil, fmt.Errorf("describe claim %s/%s in version %s: %w", c.Namespace, c.Name, v, err)
		}
	}
	return stream.Bytes(), nil
}
