{{- define "labels" -}}
app.kubernetes.io/name: ropewalk-environment
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}
