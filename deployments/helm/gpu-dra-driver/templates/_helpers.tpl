{{- define "gpu-dra-driver.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{/* Short enough for the longest suffix that is put behind it within 63 characters. */}}
{{- define "gpu-dra-driver.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- else if contains (include "gpu-dra-driver.name" .) .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name (include "gpu-dra-driver.name" .) | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "gpu-dra-driver.pluginName" -}}
{{- include "gpu-dra-driver.fullname" . }}-kubelet-plugin
{{- end -}}

{{- define "gpu-dra-driver.uninstallName" -}}
{{- include "gpu-dra-driver.fullname" . }}-uninstall
{{- end -}}

{{- define "gpu-dra-driver.selectorLabels" -}}
app.kubernetes.io/name: {{ include "gpu-dra-driver.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: kubelet-plugin
{{- end -}}

{{- define "gpu-dra-driver.labels" -}}
app.kubernetes.io/name: {{ include "gpu-dra-driver.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end -}}

{{- define "gpu-dra-driver.serviceAccountName" -}}
{{- if .Values.serviceAccount.create -}}
{{- default (include "gpu-dra-driver.pluginName" .) .Values.serviceAccount.name -}}
{{- else -}}
{{- required "serviceAccount.name: the name of an existing ServiceAccount is required with serviceAccount.create=false" .Values.serviceAccount.name -}}
{{- end -}}
{{- end -}}

{{/* Empty if the hook makes its own account. It may do so only where the chart may make accounts and grant rights. */}}
{{- define "gpu-dra-driver.uninstallAccount" -}}
{{- if and (not .Values.uninstall.serviceAccountName) (not (and .Values.serviceAccount.create .Values.rbac.create)) -}}
{{- fail "uninstall.serviceAccountName: with serviceAccount.create=false or rbac.create=false the uninstall hook makes no account and no rights of its own. Set uninstall.serviceAccountName to an existing account with the rights that docs/operations.md lists, or set uninstall.enabled=false" -}}
{{- end -}}
{{- .Values.uninstall.serviceAccountName -}}
{{- end -}}

{{/* The image is Linux's. What the user selects comes on top, and cannot change that. Takes the user's selector. */}}
{{- define "gpu-dra-driver.nodeSelector" -}}
{{- merge (dict "kubernetes.io/os" "linux") (default dict .) | toYaml -}}
{{- end -}}

{{- define "gpu-dra-driver.image" -}}
{{- if .Values.image.digest -}}
{{ .Values.image.repository }}@{{ .Values.image.digest }}
{{- else -}}
{{ .Values.image.repository }}:{{ default .Chart.AppVersion .Values.image.tag }}
{{- end -}}
{{- end -}}

{{/* The directories below the kubelet's root, at the same path inside and outside. */}}
{{- define "gpu-dra-driver.pluginsDir" -}}
{{ .Values.kubeletRootDir }}/plugins
{{- end -}}
{{- define "gpu-dra-driver.pluginDir" -}}
{{ include "gpu-dra-driver.pluginsDir" . }}/gpu.nvidia.com
{{- end -}}
{{- define "gpu-dra-driver.registrarDir" -}}
{{ .Values.kubeletRootDir }}/plugins_registry
{{- end -}}

{{/*
Directory of the hook if it lies outside the plugin's directories and so needs a mount of its own. The mount must hide neither the image's files nor
another mount of the container.
*/}}
{{- define "gpu-dra-driver.hookDir" -}}
{{- if and .Values.hookPath (not (hasPrefix (printf "%s/" (include "gpu-dra-driver.pluginsDir" .)) .Values.hookPath)) -}}
{{- $dir := dir .Values.hookPath -}}
{{- $image := "/|/usr|(/usr)?/(s?bin|lib(64)?(/[^/]+-linux-gnu)?)|/etc|/var|(/var)?/run" -}}
{{- $mounts := "/(etc/gpu-dra-driver|dev|proc|sys|host|driver-root)(/.*)?" -}}
{{- if or (regexMatch (printf "^(%s|%s)$" $image $mounts) $dir) (has $dir (list .Values.cdiRoot (include "gpu-dra-driver.registrarDir" .))) -}}
{{- fail (printf "hookPath: %s cannot be the hook's directory: it is mounted into the plugin's container at the same path, where it would hide what the plugin needs. Choose a directory of the hook's own, such as /opt/nvidia/bin, or leave hookPath empty" $dir) -}}
{{- end -}}
{{- $dir -}}
{{- end -}}
{{- end -}}

{{/*
The driver root is mounted through the directory above it. A driver container mounts its root file system there late, removes the directory when it
stops and makes a new one when it comes back: a mount of the directory itself would go on showing the removed one.
*/}}
{{- define "gpu-dra-driver.driverRootSource" -}}
{{- dir .Values.driverRoot -}}
{{- end -}}
{{- define "gpu-dra-driver.driverRootMount" -}}
{{- if eq .Values.driverRoot "/" -}}
/driver-root
{{- else -}}
/driver-root/{{ base .Values.driverRoot }}
{{- end -}}
{{- end -}}

{{/* The plugin's configuration file. Who it is (node, Pod) comes from the environment. */}}
{{- define "gpu-dra-driver.config" -}}
daemonsetName: {{ include "gpu-dra-driver.pluginName" . | quote }}
pluginDir: {{ include "gpu-dra-driver.pluginDir" . | quote }}
registrarDir: {{ include "gpu-dra-driver.registrarDir" . | quote }}
cdiRoot: {{ .Values.cdiRoot | quote }}
driverRoot: {{ .Values.driverRoot | quote }}
driverRootMount: {{ include "gpu-dra-driver.driverRootMount" . | quote }}
{{- with .Values.devRoot }}
devRoot: {{ . | quote }}
{{- end }}
sysfsRoot: /host/sys
procRoot: /host/proc
{{- with .Values.hookPath }}
hookPath: {{ . | quote }}
{{- end }}
{{- with .Values.criSocket }}
criSocket: /host/cri/{{ base . }}
{{- end }}
httpAddress: ":{{ .Values.metrics.port }}"
kubeApiQps: {{ .Values.kubeAPI.qps }}
kubeApiBurst: {{ .Values.kubeAPI.burst }}
v: {{ .Values.logVerbosity }}
loggingFormat: {{ .Values.logFormat }}
{{- end -}}
